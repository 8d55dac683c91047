"""The five collectives of data-parallel training. For each one, print what the ranks hold before and after.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 exercises/collectives.py
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=4 exercises/collectives.py

This runs on any laptop, with gloo. The page docs/collectives.md shows the collectives as pictures.
"""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()

    # The first digit of a number is its rank: 10 and 11 belong to rank 1.
    own = torch.arange(world) + 10 * rank
    show("broadcast", "rank 0 gives its tensor to all", own, broadcast(own))
    show("reduce", "rank 0 gets the sum of all tensors", own, reduce(own))
    show("all-reduce", "every rank gets the sum of all tensors", own, all_reduce(own))
    show("reduce-scatter", "every rank gets one part of the sum", own, reduce_scatter(own))
    part = own[rank : rank + 1]
    show("all-gather", "every rank gets the parts of all", part, all_gather(part))
    total = all_gather(reduce_scatter(own))
    show("reduce-scatter, then all-gather", "together they are an all-reduce", own, total)
    dist.destroy_process_group()


def broadcast(own: torch.Tensor) -> torch.Tensor:
    result = own.clone()
    dist.broadcast(result, src=0)
    return result


def reduce(own: torch.Tensor) -> torch.Tensor | None:
    result = own.clone()
    dist.reduce(result, dst=0)
    # On the other ranks the tensor now holds undefined intermediate sums.
    return result if dist.get_rank() == 0 else None


def all_reduce(own: torch.Tensor) -> torch.Tensor:
    result = own.clone()
    dist.all_reduce(result)
    return result


def reduce_scatter(own: torch.Tensor) -> torch.Tensor:
    result = torch.empty(len(own) // dist.get_world_size(), dtype=own.dtype)
    dist.reduce_scatter_single(result, own)
    return result


def all_gather(own: torch.Tensor) -> torch.Tensor:
    result = torch.empty(len(own) * dist.get_world_size(), dtype=own.dtype)
    dist.all_gather_single(result, own)
    return result


def show(name: str, description: str, before: torch.Tensor, after: torch.Tensor | None) -> None:
    """Print the tensors of all ranks. Only rank 0 prints, so that the lines appear in order."""
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (before.tolist(), "undefined" if after is None else after.tolist()))
    if dist.get_rank() != 0:
        return
    print(f"\n{name}: {description}")
    for rank, (old, new) in enumerate(ranks):
        print(f"  rank {rank}  {old!s:16} ->  {new}")


if __name__ == "__main__":
    main()
