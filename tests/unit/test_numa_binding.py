"""Tests of the NUMA binding on a made-up node. torchrun's own functions choose the CPUs of each rank."""

import os
import shutil

import pytest
import torch
from torch.numa import binding

import launch
from job import numa_binding


@pytest.fixture
def node(monkeypatch):
    """Make a node with 16 CPUs. NUMA nodes 0 and 1 are sockets of 8 CPUs, and 4 CPUs at a time share a cache."""

    def build(numa_nodes_of_gpus: dict[int, int], allowed: range = range(16)) -> None:
        answers = {
            "_get_gpu_count": lambda: len(numa_nodes_of_gpus),
            "_get_numa_node_index_for_gpu_index": lambda *, gpu_index: numa_nodes_of_gpus[gpu_index],
            "_get_cpu_indices_for_numa_node_MAYBE_NOT_ALLOWED": lambda *, numa_node_index: set(
                range(8 * numa_node_index, 8 * numa_node_index + 8)
            ),
            "_get_systemwide_numa_node_indices": lambda: {0, 1},
            "_get_socket_index_for_cpu": lambda *, cpu_index: cpu_index // 8,
            "_get_logical_cpu_indices_sharing_same_physical_core_as": lambda *, logical_cpu_index: {logical_cpu_index},
            "_get_logical_cpus_sharing_same_max_level_cache_as": lambda *, logical_cpu_index: set(
                range(logical_cpu_index // 4 * 4, logical_cpu_index // 4 * 4 + 4)
            ),
            "_get_allowed_cpu_indices_for_current_thread": lambda: set(allowed),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(binding, name, answer)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")  # as job.sh sets it: 16 CPUs / 2 ranks
    return build


FAR = {0: 0, 1: 1}  # NUMA nodes of GPUs 0 and 1
SAME = {0: 1, 1: 1}


@pytest.mark.parametrize(
    ("mode", "gpus", "cpus", "threads"),
    [
        ("node", FAR, ("0-7", "8-15"), "8"),
        ("socket", FAR, ("0-7", "8-15"), "8"),
        ("node", SAME, ("8-15", "8-15"), "4"),  # both ranks share these CPUs
        ("exclusive", SAME, ("8-11", "12-15"), "4"),
        ("core-complex", FAR, ("0-3", "8-11"), "4"),
    ],
)
def test_ranks_have_no_more_threads_than_cpus(node, capsys, mode, gpus, cpus, threads):
    node(gpus)
    numa_binding.prepare_binding(mode, "2")
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"NUMA_BINDING={mode} on node1: local rank 0 on CPUs {cpus[0]}, local rank 1 on CPUs {cpus[1]}"
    assert os.environ["OMP_NUM_THREADS"] == threads
    lowered = ["OMP_NUM_THREADS=4 instead of 8: the ranks are bound to no more CPUs"]
    assert rest == (lowered if threads == "4" else [])


def test_launch_py_shows_the_cpus_that_torchrun_binds(monkeypatch, main_of, node, capsys):
    """torchrun starts each rank's command with numactl, so its own process keeps all CPUs."""
    node(FAR)
    started = []
    monkeypatch.setattr(launch, "run", started.append)
    main_of(launch, "--numa-binding=node", "--nproc-per-node=2", "x.py")
    shown = capsys.readouterr().out
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(started[0].numa_binding))
    for rank, cpus in enumerate(("0-7", "8-15")):
        command = binding._maybe_wrap_command_args_with_numa_binding(
            ("python", "x.py"), gpu_index=rank, numa_options=options
        )
        assert command == ("numactl", f"--physcpubind={cpus}", "python", "x.py")
        assert f"local rank {rank} on CPUs {cpus}" in shown


def test_without_the_flag_nothing_is_bound(monkeypatch, main_of, capsys):
    started = []
    monkeypatch.setattr(launch, "run", started.append)
    main_of(launch, "--nproc-per-node=2", "x.py")
    assert (started[0].numa_binding, capsys.readouterr().out) == (None, "")


def test_a_node_that_cannot_bind_is_one_error_line(monkeypatch, node, refusal):
    def error(mode: str, ranks: str = "2") -> str:
        return refusal(numa_binding.prepare_binding, mode, ranks, code=3)

    remedy = "; request a GPU for each rank, and whole nodes (--exclusive), or leave NUMA_BINDING unset"
    node(FAR, allowed=range(8))
    problem = "no CPUs for local rank 1 on node1 (RuntimeError: Must bind to a non-empty set of CPU indices)"
    assert error("node") == f"error: NUMA_BINDING: {problem}{remedy}"
    for mode, rank in (("socket", 0), ("exclusive", 1), ("core-complex", 1)):  # socket needs a CPU of each NUMA node
        assert error(mode).startswith(f"error: NUMA_BINDING: no CPUs for local rank {rank} on node1 (")
    node(FAR)
    assert error("node", "3").startswith("error: NUMA_BINDING: no CPUs for local rank 2 on node1 (KeyError: 2)")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert error("node", "gpu").startswith("error: NUMA_BINDING: PyTorch sees no GPU on node1; ")
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert error("node").startswith("error: NUMA_BINDING: the program numactl is not installed on node1; ")


def test_one_rank_without_a_number_of_threads_keeps_none(monkeypatch, node):
    """OpenMP itself counts only the CPUs that the rank is bound to."""
    node({0: 0})
    monkeypatch.delenv("OMP_NUM_THREADS")
    numa_binding.prepare_binding("node", "1")
    assert "OMP_NUM_THREADS" not in os.environ
