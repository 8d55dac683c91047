"""Data-parallel training by hand, from one process to ZeRO-1. Fill in the six gaps, and check each one.

    python exercises/check.py                                                       # which gaps are right
    python exercises/data_parallel.py                                               # one process: works from the start
    torchrun --nproc_per_node=2 exercises/data_parallel.py          # two: after gap 4
    torchrun --nproc_per_node=2 exercises/data_parallel.py --zero1  # after gap 6

A small network learns to add eight numbers. The losses of one, two and four processes must be the same, with --zero1
too: whether a training is divided must not change what it computes. The page docs/by-hand.md explains each gap.
"""

import argparse
import gc
import os

# This exercise runs on the CPU, so hide GPUs before torch is imported. In torch 2.13 each Optimizer.step asks for the
# current CUDA stream, which starts CUDA. This is slow, and a GPU in exclusive-process mode rejects the second rank.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist
from torch import nn

STEPS = 60
BATCH = 16  # questions of one step, of all ranks together


def join() -> tuple[int, int]:
    """Gap 1: join the process group, over gloo. Return this process's rank and the world size.

    torchrun has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; init_process_group reads them.
    """
    raise NotImplementedError("gap 1")


def own_rows(batch: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Gap 2: the rows of the batch that this rank computes. batch: rows x columns; rows are a multiple of world.

    All ranks together must compute each row exactly once.
    """
    raise NotImplementedError("gap 2")


def start_equal(model: nn.Module) -> None:
    """Gap 3: give all ranks the weights of rank 0. Each rank has drawn its own random ones."""
    raise NotImplementedError("gap 3")


def average_gradients(model: nn.Module, world: int) -> None:
    """Gap 4: replace each gradient by its mean over all ranks.

    Each rank's loss is a mean over its own rows, so the mean of the gradients is the gradient of the whole batch.
    """
    raise NotImplementedError("gap 4")


class ZeRO1:
    """Adam whose state is divided: each rank keeps the two moments of its part of the parameters, and no others.

    All parameters stand in one row, `flat`, which is cut into `world` parts of equal length; `flat` is padded so that
    the parts are equal.
    """

    def __init__(self, model: nn.Module, rank: int, world: int, learning_rate: float):
        self.parameters = list(model.parameters())
        self.world = world
        self.part = nn.Parameter(own_part(self.flat(), rank, world).clone())
        self.adam = torch.optim.Adam([self.part], lr=learning_rate)
        self.rank = rank

    def flat(self) -> torch.Tensor:
        return in_one_row([parameter.data for parameter in self.parameters], self.world)

    def step(self) -> None:
        """Gap 6: update the own part by its own gradients, then put the parts of all ranks into the model.

        `in_one_row` and `from_one_row` turn a list of tensors into one row and back. The gradients are averaged
        already.
        """
        raise NotImplementedError("gap 6")


def own_part(flat: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Gap 5: this rank's part of a row: rank 0 has the first len(flat) / world numbers, rank 1 the next, and so on."""
    raise NotImplementedError("gap 5")


# No gaps from here on


def in_one_row(tensors: list[torch.Tensor], world: int) -> torch.Tensor:
    """All numbers of these tensors, one tensor after the other, and zeros up to a multiple of world."""
    row = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return nn.functional.pad(row, (0, -len(row) % world))


def from_one_row(flat: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """Put the numbers of a row back into the parameters that it was made of."""
    position = 0
    for parameter in parameters:
        parameter.data.copy_(flat[position : position + parameter.numel()].view_as(parameter))
        position += parameter.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero1", action="store_true", help="divide Adam's state (gaps 5 and 6)")
    arguments = parser.parse_args()
    rank, world = join() if "RANK" in os.environ else (0, 1)
    if arguments.zero1 and world == 1:
        parser.error("--zero1 needs several processes: start it by torchrun --nproc_per_node=2")

    torch.manual_seed(rank)  # each rank draws other weights, until gap 3
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    if world > 1:
        start_equal(model)
    if arguments.zero1:
        optimizer = ZeRO1(model, rank, world, learning_rate=0.01)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    questions = torch.Generator().manual_seed(1)  # the same on every rank
    for step in range(1, STEPS + 1):
        inputs = torch.randn(BATCH, 8, generator=questions)
        mine = own_rows(inputs, rank, world) if world > 1 else inputs
        loss = nn.functional.mse_loss(model(mine), mine.sum(dim=1, keepdim=True))
        model.zero_grad()
        loss.backward()
        if world > 1:
            average_gradients(model, world)
            dist.all_reduce(loss.data)  # only to print it
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item() / world:.5f}")
    if world > 1:
        dist.destroy_process_group()
        # what is left of the group ends now: one of its threads that meets Python's own end aborts the process
        gc.collect()


if __name__ == "__main__":
    main()
