"""All-reduce over all ranks of a job: is the network between its GPUs what it should be?

    torchrun --nproc_per_node=2 scripts/measure_bandwidth.py
    python scripts/measure_bandwidth.py --help

Prints the bus bandwidth as nccl-tests defines it: bytes / seconds x 2 (ranks - 1) / ranks, in GB/s. Below
--min_bandwidth (variable MIN_BANDWIDTH) it ends with exit code 3. NCCL on GPUs, gloo and small messages on CPUs.
It takes a minute at most: on a slow network the message is smaller, and there are fewer of them.
"""

import argparse
import os
import re
import time
from pathlib import Path

import torch
import torch.distributed as dist

from config import DEFAULTS
from distributed import watchdog
from distributed.collectives import rank, wait_for_all_ranks, world_size
from distributed.process_group import leave_process_group, prepare_environment, run_and_exit
from shared.errors import ENVIRONMENT, OneLineErrors, WorkshopError
from shared.json_files import write_json

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Of the FSDP document: all_reduce_perf -b 4G -e 4G -n 50
MESSAGE_BYTES = 4 * 2**30 if GPU else 4 * 2**20
ITERATIONS = 50 if GPU else 5
# The message grows until it takes so long that latency, milliseconds over many nodes, no longer counts
FIRST_BYTES = 256 * 2**10
GROWTH = 8
LONG_ENOUGH = 0.5  # seconds; the last message takes GROWTH times as long at most
BUDGET = 30  # seconds for the iterations


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    least = minimum_from_environment()
    parser.add_argument("--min_bandwidth", type=float, default=least, help="GB/s; 0 never ends the job")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()

    nccl_log = Path(f"/tmp/nccl_{os.environ.get('JOB_ID', os.getpid())}_{rank()}.log")
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_FILE", str(nccl_log))
    prepare_environment(shards=True)
    if world_size() == 1:
        print("bandwidth test: one rank has nobody to talk to")
        return
    watchdog.start(DEFAULTS["ddp_timeout"])  # a rank that hangs is named
    dist.init_process_group("nccl" if GPU else "gloo")
    watchdog.progress("the bandwidth test")

    part, iterations, seconds = measure(torch.zeros(MESSAGE_BYTES // 4, device=DEVICE))
    # four digits, not decimals: a very slow network is not one of 0.0 GB/s
    bandwidth = float(f"{bus_bandwidth(seconds, part.nbytes, world_size()):.4g}")
    result = {
        "bus_bandwidth_gb_per_s": bandwidth,
        "ranks": world_size(),
        "message_bytes": part.nbytes,
        "iterations": iterations,
        "backend": dist.get_backend(),
        "algorithm": os.environ.get("NCCL_ALGO", "NCCL's choice") if GPU else "gloo's ring",
        "transport": transport(nccl_log),
    }
    if rank() == 0:
        print("bandwidth test: " + ", ".join(f"{name} {value}" for name, value in result.items()), flush=True)
        if arguments.output:
            write_json(arguments.output, result)
    leave_process_group()
    if bandwidth < arguments.min_bandwidth:
        what = f"{bandwidth} GB/s between {world_size()} ranks, at least {arguments.min_bandwidth} GB/s expected"
        way_out = "with InfiniBand there, and NET/Socket as transport, see NCCL_IB_HCA and NCCL_IB_DISABLE; else "
        way_out += "set MIN_BANDWIDTH in the site file to what this network can do (10 GbE: 1.25 GB/s at best)"
        raise WorkshopError("bandwidth test", what, way_out, ENVIRONMENT)


def minimum_from_environment() -> float:
    text = os.environ.get("MIN_BANDWIDTH") or ("5" if GPU else "0")
    try:
        return float(text)
    except ValueError:
        way_out = "give the least bus bandwidth in GB/s in the site file, for example 5"
        raise WorkshopError("MIN_BANDWIDTH", f"{text!r} is not a number", way_out) from None


def measure(message: torch.Tensor) -> tuple[torch.Tensor, int, float]:
    """The part of the message that was sent, how often, and the seconds that it took each time. Collective."""
    size = FIRST_BYTES // 4
    while True:
        part = message[:size]
        seconds = min(seconds_per_all_reduce(part, 1) for _ in range(2))  # so that one hiccup decides nothing
        if seconds >= LONG_ENOUGH or len(part) == len(message):
            break
        size *= GROWTH
    iterations = min(ITERATIONS, 1 + int(BUDGET / seconds))
    return part, iterations, seconds_per_all_reduce(part, iterations)


def seconds_per_all_reduce(message: torch.Tensor, iterations: int) -> float:
    """Mean over the iterations, the slowest rank's, on every rank: so all of them choose the same part."""
    for i in range(1 + iterations):
        if i == 1:  # the first one opens connections
            synchronise()
            start = time.perf_counter()
        # summed, as gradients are: NVSwitches (NVLS) add up fp32, and know no other operation on it
        dist.all_reduce(message)
    synchronise()
    slowest = torch.tensor((time.perf_counter() - start) / iterations, device=DEVICE)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def synchronise() -> None:
    if GPU:
        torch.cuda.synchronize()
    wait_for_all_ranks()


def bus_bandwidth(seconds: float, message_bytes: int, ranks: int) -> float:
    """GB/s (10^9 bytes), https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    return message_bytes / seconds * 2 * (ranks - 1) / ranks / 1e9


def transport(nccl_log: Path) -> str:
    """What the ranks talk through, from NCCL's own log: e.g. NET/IB, NET/Socket, P2P/CUMEM. Removes that log."""
    if not GPU:
        return f"TCP ({os.environ.get('GLOO_SOCKET_IFNAME', 'interface chosen by gloo')})"
    text = nccl_log.read_text(errors="replace") if nccl_log.exists() else ""
    nccl_log.unlink(missing_ok=True)
    found = re.findall(r"via (NET/\w+|P2P/[\w/]+|SHM[\w/]*)", text)
    return ", ".join(sorted(set(found))) or "unknown (NCCL_DEBUG=INFO shows more)"


if __name__ == "__main__":
    run_and_exit(main)
