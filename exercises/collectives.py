"""The five collectives that data-parallel training is made of: what each rank holds before, and after.

    torchrun --nproc_per_node=2 exercises/collectives.py
    torchrun --nproc_per_node=4 exercises/collectives.py

It runs on any laptop, over gloo. The page docs/collectives.md shows the same as pictures.
"""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()

    # Each number begins with its rank: 10 and 11 are rank 1's
    own = torch.arange(world) + 10 * rank
    show("broadcast", "rank 0 gives its tensor to all", own, broadcast(own))
    show("reduce", "rank 0 gets the sum of all tensors", own, reduce(own))
    show("all-reduce", "every rank gets the sum of all tensors", own, all_reduce(own))
    show("reduce-scatter", "every rank gets one part of the sum", own, reduce_scatter(own))
    part = own[rank : rank + 1]
    show("all-gather", "every rank gets the parts of all", part, all_gather(part))
    both = all_gather(reduce_scatter(own))
    show("reduce-scatter, then all-gather", "together they are an all-reduce", own, both)
    dist.destroy_process_group()


def broadcast(own: torch.Tensor) -> torch.Tensor:
    result = own.clone()
    dist.broadcast(result, src=0)
    return result


def reduce(own: torch.Tensor) -> torch.Tensor | None:
    result = own.clone()
    dist.reduce(result, dst=0)
    # the other ranks' tensor now holds whatever the way of the sum has left in it
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


def show(name: str, what: str, before: torch.Tensor, after: torch.Tensor | None) -> None:
    """Rank 0 prints for all, so that the lines come in order."""
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (before.tolist(), "nothing of use" if after is None else after.tolist()))
    if dist.get_rank() != 0:
        return
    print(f"\n{name}: {what}")
    for rank, (held, holds) in enumerate(ranks):
        print(f"  rank {rank}  {held!s:16} ->  {holds}")


if __name__ == "__main__":
    main()
