"""Rank and world size of this process, and small collectives over all ranks."""

from typing import TypeVar

import torch
import torch.distributed as dist

from shared.errors import whole_number

T = TypeVar("T")


def world_size() -> int:
    """Return the number of ranks of the run."""
    return whole_number("WORLD_SIZE", "1")


def local_world_size() -> int:
    """Return the number of ranks on this node."""
    return whole_number("LOCAL_WORLD_SIZE", "1")


def ranks_per_gpu() -> int:
    """Return the number of ranks that share a GPU. Before bind_device it is the number that the site allows."""
    return max(1, whole_number("RANKS_PER_GPU", "1"))


def rank() -> int:
    return whole_number("RANK", "0")


def wait_for_all_ranks() -> None:
    if dist.is_initialized():
        # Name the GPU; otherwise NCCL guesses it and prints a warning
        gpu = [torch.cuda.current_device()] if "nccl" in dist.get_backend() else None
        dist.barrier(device_ids=gpu)


def print_once(text: str) -> None:
    if rank() == 0:
        print(text, flush=True)


def broadcast_from_rank_0(value: T) -> T:
    """Return rank 0's value on every rank. Collective."""
    return gather_lists([value])[0][0]


def max_over_ranks(number: int) -> int:
    """Return the largest of the ranks' numbers on every rank. Collective."""
    if world_size() == 1:
        return number
    device = "cpu" if "gloo" in dist.get_backend() else "cuda"
    box = torch.tensor(number, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return int(box.item())


def gather_lists(values: list) -> list[list]:
    """Return the lists of all ranks, in rank order, on every rank. Collective."""
    if not dist.is_initialized():
        return [values]
    lists: list = [None] * dist.get_world_size()
    dist.all_gather_object(lists, values)
    return lists
