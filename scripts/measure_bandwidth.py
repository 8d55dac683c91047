"""All-reduce over all ranks of a job: is the network between its GPUs what it should be?

    python scripts/launch.py --nproc-per-node=2 scripts/measure_bandwidth.py
    python scripts/measure_bandwidth.py --help

Prints the bus bandwidth as nccl-tests defines it: bytes / seconds x 2 (ranks - 1) / ranks, in GB/s. Below
--min_bandwidth (variable MIN_BANDWIDTH) it ends with exit code 3. NCCL on GPUs, gloo and small messages on CPUs.
It takes about a minute at most: small all-reduces first tell how large a message and how many of them fit. Where those
are already far too slow, seconds do.
"""

import argparse
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from errors import ENVIRONMENT, OneLineErrors, WorkshopError
from json_files import write_json
from knobs import DEFAULTS
from parallel import watchdog
from parallel.distributed import (
    leave_process_group,
    prepare_environment,
    rank,
    run_and_exit,
    same_everywhere,
    world_size,
)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Of the FSDP document: all_reduce_perf -b 4G -e 4G -w 20 -n 50
MESSAGE_BYTES = 4 * 2**30 if GPU else 4 * 2**20
WARM_UP = 20 if GPU else 2
ITERATIONS = 50 if GPU else 5
# What a slow network leaves of it: fewer all-reduces first, then a smaller message
LEAST_WARM_UP = 2
LEAST_ITERATIONS = 5
BUDGET = 50.0  # seconds; with the probe before it, a minute
SHORT_BUDGET = 5.0  # where the probe is far below the bandwidth that is expected
FAR_BELOW = 0.5
# The probe grows until it takes so long that latency no longer counts, which is milliseconds over many nodes
PROBE_BYTES = 256 * 2**10
PROBE_GROWTH = 8
PROBE_SECONDS = 0.1


@dataclass(frozen=True)
class Plan:
    """What is measured: the mean over `iterations` all-reduces of `message_bytes`, after `warm_up` others."""

    message_bytes: int
    warm_up: int
    iterations: int


def bus_bandwidth(seconds: float, message_bytes: int, ranks: int) -> float:
    """GB/s (10^9 bytes), https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    return message_bytes / seconds * 2 * (ranks - 1) / ranks / 1e9


def choose_plan(
    seconds_per_byte: float,
    budget: float,
    message_bytes: int | None = None,
    warm_up: int | None = None,
    iterations: int | None = None,
) -> Plan:
    """The default plan, or as much of it as fits into `budget` seconds. What is given stays, whatever it costs."""
    message = message_bytes or MESSAGE_BYTES
    share = budget / seconds_per_byte / message / (WARM_UP + ITERATIONS)
    if warm_up is None:
        warm_up = max(LEAST_WARM_UP, min(WARM_UP, int(WARM_UP * share)))
    if iterations is None:
        iterations = max(LEAST_ITERATIONS, min(ITERATIONS, int(ITERATIONS * share)))
    if message_bytes is None:
        fits = budget / seconds_per_byte / (warm_up + iterations)
        while message > max(fits, PROBE_BYTES):
            message //= 2
    return Plan(message, warm_up, iterations)


def probe(message: torch.Tensor) -> tuple[int, float]:
    """Bytes and seconds of an all-reduce of a part of the message, large enough to tell something. Collective."""
    part = PROBE_BYTES // 4
    while True:
        part = min(part, len(message))
        # the first of each size opens connections; of the next two the faster, so that one hiccup decides nothing
        seconds = min(seconds_per_all_reduce(message[:part], warm_up, 1) for warm_up in (1, 0))
        if seconds >= PROBE_SECONDS or part == len(message):
            return part * 4, seconds
        part *= PROBE_GROWTH


def plan_of_all_ranks(message: torch.Tensor, arguments: argparse.Namespace) -> Plan:
    """What is given, and for the rest what the probe leaves time for. Collective."""
    given = (arguments.message_bytes, arguments.warm_up, arguments.iterations)
    if None not in given:
        return Plan(*given)
    probe_bytes, seconds = probe(message)
    far_below = bus_bandwidth(seconds, probe_bytes, world_size()) < FAR_BELOW * arguments.min_bandwidth
    plan = choose_plan(seconds / probe_bytes, SHORT_BUDGET if far_below else BUDGET, *given)
    return same_everywhere(plan)  # ranks that disagree would wait for each other for ever


def seconds_per_all_reduce(message: torch.Tensor, warm_up: int, iterations: int) -> float:
    """Mean over the iterations, the slowest rank's, on every rank."""
    for i in range(warm_up + iterations):
        if i == warm_up:
            synchronise()
            start = time.perf_counter()
        dist.all_reduce(message, op=dist.ReduceOp.MAX)  # not SUM, which would overflow
    synchronise()
    slowest = torch.tensor((time.perf_counter() - start) / iterations, device=DEVICE)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def synchronise() -> None:
    if GPU:
        torch.cuda.synchronize()
    dist.barrier()


def transport(nccl_log: str) -> str:
    """What the ranks talk through, from NCCL's own log: e.g. NET/IB, NET/Socket, P2P/CUMEM."""
    if not GPU:
        return f"TCP ({os.environ.get('GLOO_SOCKET_IFNAME', 'interface chosen by gloo')})"
    found = re.findall(r"via (NET/\w+|P2P/[\w/]+|SHM[\w/]*)", nccl_log)
    return ", ".join(sorted(set(found))) or "unknown (NCCL_DEBUG=INFO shows more)"


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--min_bandwidth", type=float, default=minimum_from_environment(), help="GB/s; 0 never ends the job"
    )
    fewer = "here, less on a slow network"
    parser.add_argument("--message_bytes", type=int, help=f"{MESSAGE_BYTES} {fewer}")
    parser.add_argument("--warm_up", type=int, help=f"all-reduces that are not measured; {WARM_UP} {fewer}")
    parser.add_argument("--iterations", type=int, help=f"all-reduces that are measured; {ITERATIONS} {fewer}")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    for name, least in (("message_bytes", 4), ("warm_up", 0), ("iterations", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise WorkshopError(f"--{name}", f"{value} is too small", f"give at least {least}")
    measure(arguments)


def minimum_from_environment() -> float:
    text = os.environ.get("MIN_BANDWIDTH") or ("5" if GPU else "0")
    try:
        return float(text)
    except ValueError:
        raise WorkshopError(
            "MIN_BANDWIDTH", f"{text!r} is not a number", "give the least bus bandwidth in GB/s, for example 5"
        ) from None


def measure(arguments: argparse.Namespace) -> None:
    log = Path(f"/tmp/nccl_{os.environ.get('JOB_ID', os.getpid())}_{rank()}.log")
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_FILE", str(log))
    prepare_environment(shards=True)
    if world_size() == 1:
        print("bandwidth test: one rank has nobody to talk to")
        return
    watchdog.start(DEFAULTS["ddp_timeout"])
    dist.init_process_group("nccl" if GPU else "gloo")
    watchdog.beat("the bandwidth test")
    message = torch.ones((arguments.message_bytes or MESSAGE_BYTES) // 4, device=DEVICE)
    plan = plan_of_all_ranks(message, arguments)
    message = message[: plan.message_bytes // 4]
    seconds = seconds_per_all_reduce(message, plan.warm_up, plan.iterations)
    # four digits, not decimals: a very slow network is not one of 0.0 GB/s
    bandwidth = same_everywhere(float(f"{bus_bandwidth(seconds, message.nbytes, world_size()):.4g}"))
    text = log.read_text(errors="replace") if log.exists() else ""
    log.unlink(missing_ok=True)
    result = {
        "bus_bandwidth_gb_per_s": bandwidth,
        "ranks": world_size(),
        "message_bytes": message.nbytes,
        "iterations": plan.iterations,
        "backend": dist.get_backend(),
        "algorithm": os.environ.get("NCCL_ALGO", "NCCL's choice") if GPU else "gloo's ring",
        "transport": transport(text),
    }
    if rank() == 0:
        print("bandwidth test: " + ", ".join(f"{name} {value}" for name, value in result.items()), flush=True)
        if arguments.output:
            write_json(arguments.output, result)
    leave_process_group()
    if bandwidth < arguments.min_bandwidth:
        raise WorkshopError(
            "bandwidth test",
            f"{bandwidth} GB/s between {world_size()} ranks, at least {arguments.min_bandwidth} GB/s expected",
            "set NCCL_SOCKET_IFNAME and NCCL_IB_HCA in the site file (ip -brief address; ibstat -l)",
            ENVIRONMENT,
        )


if __name__ == "__main__":
    run_and_exit(main)
