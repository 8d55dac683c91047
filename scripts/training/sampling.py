"""The order of the training questions for `--train_sampling_strategy group_by_length`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler


class GroupByLengthSampler(LengthGroupedSampler):
    """LengthGroupedSampler whose order depends only on the seed, the epoch and the global batch.

    transformers' own sampler draws its order from torch's global generator, and a resumed run restores the generator's
    state too late for that. transformers' sampler also groups within each rank, so the groups depend on the number of
    ranks. In both cases a resumed run would train on some questions of the epoch twice, and on other questions never.
    """

    epoch = 0  # set by upstream_fixes.EpochOfSampler

    def __init__(self, global_batch: int, lengths: list[int], seed: int):
        super().__init__(global_batch, lengths=lengths, generator=torch.Generator())
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        return super().__iter__()


def find_sampler(loader: Any) -> Sampler:
    """Return the sampler of a DataLoader, which accelerate has wrapped in batch samplers."""
    batches = loader.batch_sampler
    while not hasattr(batches, "sampler"):
        batches = batches.batch_sampler
    return batches.sampler
