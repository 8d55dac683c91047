"""Kernels and kept bytes of a micro batch of bloom-560m, which decide its speed on a GPU and its memory.

A GPU that trains bloom-560m on small micro batches waits until kernels are launched, so each kernel counts. The model
has its 24 layers, but no memory for tensors. The loss, the optimizer and compiled code are not counted.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache

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
# way to train -> padding, attention, kernels and kept MiB of a micro batch of 16 questions
COUNTS = {
    "recipe": (512, "eager", 1781, 16771),
    "dynamic padding and SDPA": (432, "sdpa", 1264, 6565),
    "no padding": (0, "sdpa", 1405, 3866),
}
WITHOUT_AUTOCAST = (878, 3017)  # no padding, with weights in 16-bit precision, as DeepSpeed and FSDP hold them


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


@cache
def count(padding: int, attention: str, with_autocast: bool = True) -> tuple[Counter[str], int]:
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
    padding, attention, most_kernels, most_mib = COUNTS[way]
    kernels, mib = count(padding, attention)
    assert kernels.total() <= most_kernels, kernels.most_common()
    assert mib <= most_mib


def test_weights_in_16_bit_need_no_casts():
    kernels, mib = count(0, "sdpa", with_autocast=False)
    most_kernels, most_mib = WITHOUT_AUTOCAST
    assert kernels.total() <= most_kernels, kernels.most_common()
    assert mib <= most_mib


def test_a_step_of_16_questions_has_a_fraction_of_the_recipes_kernels_and_bytes():
    """The recipe needs four micro batches of 4 questions for them. A micro batch of any size has as many kernels."""
    (recipe_kernels, recipe_mib), (kernels, mib) = (count(*COUNTS[way][:2]) for way in ("recipe", "no padding"))
    assert kernels.total() <= 0.2 * 4 * recipe_kernels.total()
    assert mib <= 0.25 * recipe_mib
