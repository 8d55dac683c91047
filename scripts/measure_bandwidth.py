"""Measure the bandwidth of an all-reduce over all ranks of a job, to find a slow network before the training.

    torchrun --nproc_per_node=2 scripts/measure_bandwidth.py
    torchrun --nproc_per_node=2 scripts/measure_bandwidth.py --sizes
    python scripts/measure_bandwidth.py --help

The script prints the bus bandwidth as nccl-tests defines it: bytes / seconds x 2 (ranks - 1) / ranks, in GB/s. It ends
with exit code 3 if the bandwidth is below --min_bandwidth (variable MIN_BANDWIDTH). It uses NCCL on GPUs, and gloo with
small messages on CPUs. It takes at most a minute: on a slow network it sends fewer and smaller messages.

With --sizes it then measures messages from 32 KiB to 1 GiB (on CPUs to 64 MiB), which takes at most another minute. It
prints a table, which docs/collectives.md explains.
"""

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from config import DEFAULTS, NOT_NEGATIVE
from distributed import watchdog
from distributed.collectives import print_once, rank, ranks_per_gpu, wait_for_all_ranks, world_size
from distributed.process_group import leave_process_group, prepare_environment, run_and_exit
from shared.errors import ENVIRONMENT, OneLineErrors, WorkshopError
from shared.json_files import write_json

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The FSDP document runs all_reduce_perf -b 4G -e 4G -n 50
MESSAGE_BYTES = 4 * 2**30 if GPU else 4 * 2**20
ITERATIONS = 50 if GPU else 5
# The message grows until its latency is negligible. The latency is milliseconds on many nodes
FIRST_BYTES = 256 * 2**10
GROWTH = 8
LONG_ENOUGH = 0.5  # seconds; the last message takes at most GROWTH times as long
BUDGET = 30  # seconds for all iterations together
# The messages of --sizes
SMALLEST_BYTES = 32 * 2**10
LARGEST_BYTES = 2**30 if GPU else 64 * 2**20
SECONDS_PER_PART = 0.1
REPEATS = 5
PLATEAU = 0.9  # part of the bandwidth of the largest message


class Size(NamedTuple):
    """The seconds of an all-reduce of one message size, and its bus bandwidth in GB/s."""

    message_bytes: int
    seconds: float
    bus_bandwidth_gb_per_s: float


def main() -> None:
    parser = OneLineErrors(description=__doc__)
    minimum = os.environ.get("MIN_BANDWIDTH") or ("5" if GPU else "0")
    text = "in GB/s, by default the variable MIN_BANDWIDTH; 0 accepts any bandwidth"
    parser.add_argument("--min_bandwidth", type=NOT_NEGATIVE.number, default=minimum, help=text)
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    parser.add_argument("--sizes", action="store_true", help="also measure many message sizes")
    arguments = parser.parse_args()

    nccl_log = Path(f"/tmp/nccl_{os.environ.get('JOB_ID', os.getpid())}_{rank()}.log")
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_FILE", str(nccl_log))
    prepare_environment(shards=True)
    if world_size() == 1 or ranks_per_gpu() > 1:
        print_once(f"bandwidth test: skipped, {'ranks share a GPU' if world_size() > 1 else 'there is only one rank'}")
        return
    watchdog.start(DEFAULTS["ddp_timeout"])  # the watchdog names a rank that hangs
    dist.init_process_group("nccl" if GPU else "gloo")
    watchdog.progress("the bandwidth test")

    part, iterations, seconds = measure(torch.zeros(MESSAGE_BYTES // 4, device=DEVICE))
    # four significant digits, because decimals would show a very slow network as 0.0 GB/s
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
    if arguments.sizes:
        watchdog.progress("the bandwidth of many sizes")
        sizes = measure_sizes(torch.zeros(LARGEST_BYTES // 4, device=DEVICE))
        if rank() == 0:
            print("\n".join(table(sizes)), flush=True)
        result["sizes"] = [size._asdict() for size in sizes]
    if rank() == 0 and arguments.output:
        write_json(arguments.output, result)
    leave_process_group()
    if bandwidth < arguments.min_bandwidth:
        what = f"{bandwidth} GB/s between {world_size()} ranks, at least {arguments.min_bandwidth} GB/s expected"
        remedy = "if there is InfiniBand but the transport is NET/Socket, check NCCL_IB_HCA and NCCL_IB_DISABLE; "
        remedy += "else set MIN_BANDWIDTH in the site file to what this network can do (10 GbE: at most 1.25 GB/s)"
        raise WorkshopError("bandwidth test", what, remedy, ENVIRONMENT)


def measure(message: torch.Tensor) -> tuple[torch.Tensor, int, float]:
    """Time all-reduces of growing parts of `message`. Collective.

    Return the largest part that was sent, the number of iterations, and the seconds per iteration.
    """
    size = FIRST_BYTES // 4
    while True:
        part = message[:size]
        seconds = min(seconds_per_all_reduce(part, 1) for _ in range(2))  # the faster of two ignores a short delay
        if seconds >= LONG_ENOUGH or len(part) == len(message):
            break
        size *= GROWTH
    iterations = min(ITERATIONS, 1 + int(BUDGET / seconds))
    return part, iterations, seconds_per_all_reduce(part, iterations)


def measure_sizes(message: torch.Tensor) -> list[Size]:
    """Time all-reduces of parts of `message` that double in size. Collective.

    The last part is the whole message, or the first one that takes LONG_ENOUGH. All parts are measured several times,
    and the fastest time counts, because other programs on a machine delay some measurements.
    """
    fastest: dict[int, float] = {}  # length of a part -> seconds
    for _ in range(REPEATS):
        length = SMALLEST_BYTES // 4
        while length <= len(message):
            part = message[:length]
            once = fastest.get(length) or seconds_per_all_reduce(part, 1)
            seconds = seconds_per_all_reduce(part, max(1, int(SECONDS_PER_PART / once)))
            fastest[length] = min(seconds, fastest.get(length, seconds))
            if seconds > LONG_ENOUGH:
                break
            length *= 2
    return [Size(4 * length, s, bus_bandwidth(s, 4 * length, world_size())) for length, s in sorted(fastest.items())]


def seconds_per_all_reduce(message: torch.Tensor, iterations: int) -> float:
    """Return the mean time of the slowest rank. All ranks get the same number, so all choose the same message size."""
    for i in range(1 + iterations):
        if i == 1:  # the first all-reduce opens connections and is not timed
            synchronise()
            start = time.perf_counter()
        # a sum, as for gradients; it is the only fp32 operation that NVSwitches (NVLS) support
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
    """Bus bandwidth in GB/s (10^9 bytes): https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    return message_bytes / seconds * 2 * (ranks - 1) / ranks / 1e9


def table(sizes: list[Size]) -> list[str]:
    """Return a line for each size, and a last line with the size that is large enough for the link."""
    lines = [f"{'message':>9}{'time (ms)':>12}{'bus bandwidth (GB/s)':>23}"]
    for size in sizes:
        milliseconds = size.seconds * 1000
        lines.append(f"{size_name(size.message_bytes):>9}{milliseconds:12.3f}{size.bus_bandwidth_gb_per_s:23.4g}")
    if sizes[-1].message_bytes < LARGEST_BYTES:
        lines.append(f"larger messages are left out, because this one took more than {LONG_ENOUGH} s")
    # Compare with the largest message, because a message that fits into a CPU's cache can be faster
    plateau = PLATEAU * sizes[-1].bus_bandwidth_gb_per_s
    slow = [size.message_bytes for size in sizes if size.bus_bandwidth_gb_per_s < plateau]
    first = min(size.message_bytes for size in sizes if size.message_bytes > max(slow, default=0))
    lines.append(
        f"from {size_name(first)} on, every message reaches at least {100 * PLATEAU:.0f} % of the last bandwidth"
    )
    return lines


def size_name(message_bytes: int) -> str:
    """Return a power of two as text, such as 32 KiB."""
    unit = min(3, (message_bytes.bit_length() - 1) // 10)
    return f"{message_bytes >> 10 * unit} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def transport(nccl_log: Path) -> str:
    """Return the transports from NCCL's log, for example NET/IB, NET/Socket or P2P/CUMEM. Delete the log."""
    if not GPU:
        return f"TCP ({os.environ.get('GLOO_SOCKET_IFNAME', 'interface chosen by gloo')})"
    text = nccl_log.read_text(errors="replace") if nccl_log.exists() else ""
    nccl_log.unlink(missing_ok=True)
    found = re.findall(r"via (NET/\w+|P2P/[\w/]+|SHM[\w/]*)", text)
    return ", ".join(sorted(set(found))) or "unknown (NCCL_DEBUG=INFO shows more)"


if __name__ == "__main__":
    run_and_exit(main)
