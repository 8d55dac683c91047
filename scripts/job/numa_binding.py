"""NUMA binding: torchrun starts each rank on CPUs near its GPU (--numa-binding; in jobs the site's NUMA_BINDING).

For each rank, torchrun reads the CPUs near its GPU from /sys, and starts the rank's command with the program numactl.
This module computes the same CPUs before the ranks start, so that a problem is one line instead of a traceback.
"""

import os
import shutil

import torch
from torch.distributed.run import determine_local_world_size
from torch.numa.binding import (
    AffinityMode,
    NumaOptions,
    _get_ranges_str_from_ints,
    _get_validated_logical_cpus_to_bind_to,
)

from distributed.rendezvous import node_name
from shared.errors import ENVIRONMENT, WorkshopError


def prepare_binding(mode: str, ranks: str) -> None:
    """Print the CPUs of this node's ranks, and give no rank more threads than it has CPUs.

    ranks: torchrun's --nproc-per-node. Raises WorkshopError (exit code 3) if torchrun could not bind the ranks.
    """
    if not shutil.which("numactl"):
        raise refusal(f"the program numactl is not installed on {node_name()}", "install it")
    if not torch.cuda.is_available():
        raise refusal(f"PyTorch sees no GPU on {node_name()}", "run on a node with GPUs")
    bound = [cpus_of_rank(mode, rank) for rank in range(determine_local_world_size(ranks))]
    shown = (f"local rank {rank} on CPUs {_get_ranges_str_from_ints(cpus)}" for rank, cpus in enumerate(bound))
    print(f"NUMA_BINDING={mode} on {node_name()}: {', '.join(shown)}", flush=True)
    limit_threads(bound)


def cpus_of_rank(mode: str, rank: int) -> set[int]:
    """Return the CPUs that torchrun will bind this local rank to."""
    options = NumaOptions(affinity_mode=AffinityMode(mode))
    try:
        return _get_validated_logical_cpus_to_bind_to(gpu_index=rank, numa_options=options)
    except Exception as error:  # for example: no CPU near the GPU belongs to the job, or /sys is hidden
        what = f"no CPUs for local rank {rank} on {node_name()} ({type(error).__name__}: {error})"
        raise refusal(what, "request a GPU for each rank, and whole nodes (--exclusive)") from error


def refusal(what: str, remedy: str) -> WorkshopError:
    return WorkshopError("NUMA_BINDING", what, f"{remedy}, or leave NUMA_BINDING unset", ENVIRONMENT)


def limit_threads(bound: list[set[int]]) -> None:
    """Lower OMP_NUM_THREADS if the ranks would have more threads than the CPUs they are bound to.

    job.sh and share_cores divide all CPUs of the node by its ranks, without considering the binding. Bound ranks may
    have fewer CPUs: those of one NUMA node that has all the GPUs, or those of one core complex.
    """
    threads = max(1, min(len(cpus) // bound.count(cpus) for cpus in bound))
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > threads:
        print(f"OMP_NUM_THREADS={threads} instead of {given}: the ranks are bound to no more CPUs", flush=True)
        os.environ["OMP_NUM_THREADS"] = str(threads)
