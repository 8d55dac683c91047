"""Check the collectives of ranks that share one GPU. run.py starts it. Rank 0 prints a RESULT line.

Without a GPU, the ranks check gloo instead.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GPU = torch.cuda.is_available()
TOTAL = WORLD * (WORLD + 1) // 2  # sum of the numbers from 1 to WORLD


def filled(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((1000,), value, dtype=dtype, device="cuda:0" if GPU else "cpu")


def gives(expected: float | list[float], collective: Callable[[torch.Tensor], object], x: torch.Tensor) -> bool:
    """Return whether a collective fills `x` with the expected numbers."""
    collective(x)
    return bool((x == torch.tensor(expected, dtype=x.dtype, device=x.device)).all())


def gather_objects() -> bool:
    gathered: list = [None] * WORLD
    dist.all_gather_object(gathered, {"rank": RANK})
    return gathered == [{"rank": rank} for rank in range(WORLD)]


def check() -> dict[str, bool]:
    """Return which collectives give the right result. All ranks call them in the same order."""
    parts = torch.cat([filled(rank) for rank in range(WORLD)])
    right = {
        f"all_reduce {dtype}": gives(TOTAL, dist.all_reduce, filled(RANK + 1, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    } | {
        "all_gather": gives(parts.tolist(), lambda x: dist.all_gather_into_tensor(x, filled(RANK)), parts * 0),
        "reduce_scatter": gives(RANK * WORLD, lambda x: dist.reduce_scatter_tensor(x, parts), filled(0)),
        "broadcast": gives(0, lambda x: dist.broadcast(x, 0), filled(RANK)),
        "objects": gather_objects(),
    }
    if GPU:  # gloo has no average
        right["average"] = gives(TOTAL / WORLD, lambda x: dist.all_reduce(x, dist.ReduceOp.AVG), filled(RANK + 1))
    return right


def main() -> None:
    dist.init_process_group("nccl" if GPU else "gloo", timeout=timedelta(seconds=45))
    right = check()
    if RANK == 0:
        nccl = torch.cuda.nccl.version() if GPU else None
        print("RESULT " + json.dumps({"ranks": WORLD, "nccl": nccl, "right": right}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if all(right.values()) else 1)


if __name__ == "__main__":
    main()
