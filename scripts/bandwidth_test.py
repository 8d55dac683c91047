"""All-reduce over all ranks of a job: is the network between its GPUs what it should be?

    torchrun --nproc_per_node=2 scripts/bandwidth_test.py
    python scripts/bandwidth_test.py --help

Prints the bus bandwidth as nccl-tests defines it: bytes / seconds x 2 (ranks - 1) / ranks, in GB/s. Below
--min_bandwidth (variable MIN_BANDWIDTH) it ends with exit code 3. NCCL on GPUs, gloo and small messages on CPUs.
"""

import argparse
import os
import re
import time
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import leave_process_group, prepare_environment, rank, run_and_exit, same_everywhere, world_size
from errors import ENVIRONMENT, OneLineErrors, fail
from finish import write_json

GPU = torch.cuda.is_available()
# message size, warm-up and iterations of the FSDP document: all_reduce_perf -b 4G -e 4G -w 20 -n 50
MESSAGE_BYTES, WARM_UP, ITERATIONS = (4 * 2**30, 20, 50) if GPU else (4 * 2**20, 2, 5)


def bus_bandwidth(seconds: float, message_bytes: int, ranks: int) -> float:
    """GB/s (10^9 bytes), https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    return message_bytes / seconds * 2 * (ranks - 1) / ranks / 1e9


def seconds_per_all_reduce(message_bytes: int, warm_up: int, iterations: int) -> float:
    """Mean over the iterations, the slowest rank's."""
    message = torch.ones(message_bytes // 4, device="cuda" if GPU else "cpu")
    for i in range(warm_up + iterations):
        if i == warm_up:
            synchronise()
            start = time.perf_counter()
        dist.all_reduce(message, op=dist.ReduceOp.MAX)  # not SUM, which would overflow
    synchronise()
    slowest = torch.tensor((time.perf_counter() - start) / iterations, device=message.device)
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
    parser.add_argument("--message_bytes", type=int, default=MESSAGE_BYTES, help="%(default)s here")
    parser.add_argument("--warm_up", type=int, default=WARM_UP)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    for name in ("message_bytes", "iterations"):
        if getattr(arguments, name) < 4 ** (name == "message_bytes"):
            fail(f"--{name}", f"{getattr(arguments, name)} is too small", "give a larger number")
    measure(arguments)


def minimum_from_environment() -> float:
    text = os.environ.get("MIN_BANDWIDTH") or ("5" if GPU else "0")
    try:
        return float(text)
    except ValueError:
        fail("MIN_BANDWIDTH", f"{text!r} is not a number", "give the least bus bandwidth in GB/s, for example 5")


def measure(arguments: argparse.Namespace) -> None:
    log = Path(f"/tmp/nccl_{os.environ.get('JOB_ID', os.getpid())}_{rank()}.log")
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_FILE", str(log))
    prepare_environment(shards=True)
    if world_size() == 1:
        print("bandwidth test: one rank has nobody to talk to")
        return
    dist.init_process_group("nccl" if GPU else "gloo")
    seconds = seconds_per_all_reduce(arguments.message_bytes, arguments.warm_up, arguments.iterations)
    bandwidth = same_everywhere(round(bus_bandwidth(seconds, arguments.message_bytes, world_size()), 3))
    text = log.read_text(errors="replace") if log.exists() else ""
    log.unlink(missing_ok=True)
    result = {
        "bus_bandwidth_gb_per_s": bandwidth,
        "ranks": world_size(),
        "message_bytes": arguments.message_bytes,
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
        fail(
            "bandwidth test",
            f"{bandwidth} GB/s between {world_size()} ranks, at least {arguments.min_bandwidth} GB/s expected",
            "set NCCL_SOCKET_IFNAME and NCCL_IB_HCA in the site file (ip -brief address; ibstat -l)",
            ENVIRONMENT,
        )


if __name__ == "__main__":
    run_and_exit(main)
