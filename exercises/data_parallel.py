"""Data-parallel training by hand, from one process to ZeRO-1. Fill in the six gaps, and check each one.

    python exercises/check.py                                                         # which gaps are right
    python exercises/data_parallel.py                                                 # works from the start
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 exercises/data_parallel.py          # works after gap 4
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 exercises/data_parallel.py --zero1  # works after gap 6

A small network learns to add eight numbers. One, two and four processes must compute the same losses, also with
--zero1: sharing the work among ranks must not change the result. The page docs/by-hand.md explains each gap.
"""

import argparse
import gc
import os

# This exercise runs on the CPU, so hide GPUs before torch is imported. In torch 2.13 each Optimizer.step asks for the
# current CUDA stream, which starts CUDA. This is slow, and a GPU in exclusive-process mode rejects the second rank.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Let OpenMP's threads wait only briefly in a loop. Otherwise one process is many times slower next to other programs
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.distributed as dist
from torch import nn

STEPS = 60
BATCH = 16  # rows of one step, for all ranks together


def join() -> tuple[int, int]:
    """Gap 1: join the process group, with gloo. Return this process's rank and the world size.

    torchrun sets the environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. init_process_group reads
    them.
    """
    raise NotImplementedError("gap 1")


def own_rows(batch: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Gap 2: return the rows of the batch that this rank computes.

    batch: a tensor of rows x columns. The number of rows is a multiple of `world`.
    Each row must belong to exactly one rank.
    """
    raise NotImplementedError("gap 2")


def start_equal(model: nn.Module) -> None:
    """Gap 3: give all ranks the weights of rank 0. At first each rank has its own random weights."""
    raise NotImplementedError("gap 3")


def average_gradients(model: nn.Module, world: int) -> None:
    """Gap 4: replace each gradient by its mean over all ranks.

    Each rank's loss is the mean over its own rows, so the mean of the gradients is the gradient of the whole batch.
    """
    raise NotImplementedError("gap 4")


class ZeRO1:
    """Adam with a divided state: each rank keeps only the two moments of its own part of the parameters.

    All parameters form one long row, which is cut into `world` parts. Zeros at its end make the parts equally long.
    """

    def __init__(self, model: nn.Module, rank: int, world: int, learning_rate: float):
        self.parameters = list(model.parameters())
        self.world = world
        self.part = nn.Parameter(own_part(self.flat_parameters(), rank, world).clone())
        self.adam = torch.optim.Adam([self.part], lr=learning_rate)
        self.rank = rank

    def flat_parameters(self) -> torch.Tensor:
        return flatten_tensors([parameter.data for parameter in self.parameters], self.world)

    def step(self) -> None:
        """Gap 6: update this rank's part with its gradients, then copy the new parts of all ranks into the model.

        `flatten_tensors` turns a list of tensors into one row. `unflatten_into` copies a row back into parameters.
        The gradients are already averaged.
        """
        raise NotImplementedError("gap 6")


def own_part(flat: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Gap 5: return this rank's part of a row.

    Rank 0 has the first len(flat) / world numbers, rank 1 has the next, and so on.
    """
    raise NotImplementedError("gap 5")


# All gaps are above.


def flatten_tensors(tensors: list[torch.Tensor], world: int) -> torch.Tensor:
    """Return the numbers of all tensors as one flat tensor, padded with zeros to a multiple of `world`."""
    row = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return nn.functional.pad(row, (0, -len(row) % world))


def unflatten_into(flat: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """Copy the numbers of a row back into the parameters from which the row was made."""
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
        parser.error("--zero1 needs several processes; start with torchrun --nproc_per_node=2")

    torch.manual_seed(rank)  # each rank draws different weights, which gap 3 makes equal
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    if world > 1:
        start_equal(model)
    if arguments.zero1:
        optimizer = ZeRO1(model, rank, world, learning_rate=0.01)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    generator = torch.Generator().manual_seed(1)  # gives the same inputs on every rank
    for step in range(1, STEPS + 1):
        inputs = torch.randn(BATCH, 8, generator=generator)
        mine = own_rows(inputs, rank, world) if world > 1 else inputs
        loss = nn.functional.mse_loss(model(mine), mine.sum(dim=1, keepdim=True))
        model.zero_grad()
        loss.backward()
        if world > 1:
            average_gradients(model, world)
            dist.all_reduce(loss.data)  # needed only for the printed loss
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item() / world:.5f}")
    if world > 1:
        dist.destroy_process_group()
        # Free what is left of the process group now. If one of its threads still runs when Python exits, Python aborts.
        gc.collect()


if __name__ == "__main__":
    main()
