"""Kernels and kept bytes of a micro batch of bloom-560m, which decide its speed on a GPU and its memory.

A GPU that trains bloom-560m on small micro batches waits until kernels are launched, so each kernel counts. The model
has its 24 layers, but no memory for tensors. The loss, the optimizer and compiled code are not counted.
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import ModelArguments
from data_loader import OneRow
from estimate.model_shape import ForwardPass, autocast, model_without_storage
from model import load_config

# 16 questions of SQuAD have about 2,781 tokens, and the longest of 16 about 432
LENGTHS = (432, 127, 144, 188, 131, 165, 171, 149, 212, 118, 157, 203, 136, 160, 142, 146)
# way to train -> padding, attention, autocast, kernels and kept MiB of a micro batch of 16 questions
COUNTS = {
    "recipe": (512, "eager", True, 1781, 16771),
    "no padding": (0, "sdpa", True, 1405, 4317),
    "no padding, with weights in 16-bit precision, as DeepSpeed and FSDP hold them": (0, "sdpa", False, 878, 3440),
}


class CountKernels(TorchDispatchMode):
    """Count the operations that write a tensor: each is at least one kernel on a GPU. A view writes none."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage(tensor) for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        made = {storage(tensor) for tensor in tree_leaves(result) if torch.is_tensor(tensor)}
        if made - given or func._schema.is_mutable:
            self.kernels[str(func)] += 1
        return result


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def count(padding: int, attention: str, with_autocast: bool) -> tuple[Counter[str], int]:
    """Return the kernels and the kept MiB of forward and backward pass. padding: tokens of a row, 0 for one row."""
    config = load_config(ModelArguments("bigscience/bloom-560m")).to_json_string(use_diff=False)
    sizes = {"batch": len(LENGTHS), "length": 512, "tensor_parallel": 1, "loss": "full", "on_cpu": False}
    how = {"precision": "bf16", "autocast": with_autocast, "recomputes": False, "attention": attention}
    forward = ForwardPass(config, **sizes, **how, one_row=not padding)
    kept: dict[int, int] = {}
    with model_without_storage(forward) as model:
        model.lm_head.forward = lambda hidden: hidden
        weights = {storage(parameter) for parameter in model.parameters()}
        if padding:
            tokens = torch.ones(len(LENGTHS), padding, dtype=torch.long)
            batch = {"input_ids": tokens, "attention_mask": tokens}
        else:
            batch = OneRow()([dict.fromkeys(("input_ids", "labels"), [1] * length) for length in LENGTHS])
            del batch["labels"]
        counting = CountKernels()
        with counting, torch.autograd.graph.saved_tensors_hooks(note_into(kept, weights), lambda tensor: tensor):
            with autocast(forward):
                hidden = model(**batch, use_cache=False).logits
            hidden.backward(torch.empty_like(hidden))
    return counting.kernels, sum(kept.values()) >> 20


def note_into(kept: dict[int, int], weights: set[int]) -> Callable:
    def note(tensor: torch.Tensor) -> torch.Tensor:
        if storage(tensor) not in weights:
            kept[storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    return note


@pytest.mark.parametrize("way", COUNTS)
def test_no_change_adds_kernels_or_kept_bytes(way: str):
    *how, most_kernels, most_mib = COUNTS[way]
    kernels, mib = count(*how)
    assert kernels.total() <= most_kernels, kernels.most_common()
    assert mib <= most_mib
