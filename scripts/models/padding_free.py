"""Training without padding, for `--padding none`: a micro batch is one row with the tokens of its questions in order.

All layers but the attention process each token separately, so they compute the row as it is. The row ends with a few
tokens of padding, which no question sees (`data_loader.OneRow`). Only the attention pads each question. It must not mix
questions, so it copies queries, keys and values of each question into a row of their own (`Layout.pad`), padded to the
longest question, and copies its output back (`Layout.unpad`). All padding comes after the real tokens of its row, so
under a causal mask no real token attends to it.

Shapes: T tokens of the one row, B questions, L tokens of the longest question (rounded up), S numbers per token, H
heads, K head size.

transformers can also train on such rows, but computes the attention of the whole row under a mask. If use_cache is
true, it leaves out this mask without a warning, and questions see each other.
"""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shared.errors import WorkshopError

# Model types for which a test compares loss and gradients with those of padded batches. In another model a layer that
# is not an attention could mix questions, without an error
OWN_ATTENTION = ("bloom", "custom-gpt")  # bloom_sdpa.py and custom_model.py call pad and unpad themselves
TESTED = (*OWN_ATTENTION, "gpt2", "gpt_neox", "llama", "opt", "qwen2", "qwen3")
NAME = "sdpa_without_padding"  # under which transformers knows the function `attention`
USE_LONGEST = "use --padding longest"


class Layout:
    """The places of the current micro batch's tokens in the padded rows of the attention.

    rows: (B, L), int64: the index of a token in the one row. In the place of padding it is the index of any token. None
    if the current batch is padded, so that `pad` and `unpad` have nothing to do. places: (T), int64: the index of each
    token's place in the flattened `rows`.
    """

    rows: torch.Tensor | None = None
    places: torch.Tensor

    def pad(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (1, T, S) as (B, L, S). What is in the place of padding has no meaning."""
        if self.rows is None:
            return tokens
        return Pad.apply(tokens[0], self.rows.flatten(), self.places).unflatten(0, self.rows.shape)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Undo `pad`: return (B, L, S) as (1, T, S)."""
        if self.rows is None:
            return padded
        return Unpad.apply(padded.flatten(0, 1), self.places)[None]


class Pad(torch.autograd.Function):
    """Copy tokens (T, S) to their places (B L, S). PyTorch would add up gradients, and padding has none to add."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return tokens.index_select(0, rows)  # (B L, S)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None  # (T, S)


class Unpad(torch.autograd.Function):
    """Copy tokens (T, S) back from their places (B L, S). The gradient of padding is 0."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.size = len(padded)
        return padded.index_select(0, places)  # (T, S)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        (places,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.size, gradient.shape[1]).index_copy_(0, places, gradient), None  # (B L, S)


PADDED = Layout()  # the layout of a model that always gets padded batches


def check_padding_free(meta_model: PreTrainedModel, attention: str, sees_all: bool) -> None:
    """Raise WorkshopError (exit code 2) if the model cannot be trained on batches without padding.

    meta_model: the model without memory for its weights. attention: its name. sees_all: whether a token sees all
    earlier tokens, and not only those in a window.
    """
    kind = meta_model.config.get_text_config().model_type
    if kind not in TESTED:
        raise WorkshopError("--padding", f"none works with {', '.join(TESTED)}, and this model is {kind}", USE_LONGEST)
    if attention != "sdpa":
        raise WorkshopError("--padding", "none needs --attention sdpa", f"give it, or {USE_LONGEST}")
    if not sees_all:
        raise WorkshopError("--padding", "none does not work with the sliding window of this model", USE_LONGEST)


def use_padding_free(model: PreTrainedModel) -> None:
    """Let a causal LM compute batches of `data_loader.OneRow` as if each question were a row of its own.

    It still computes padded batches, such as those of a generation.
    """
    layout = Layout()
    config = model.config.get_text_config()
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    for module in model.modules():
        module.layout = layout  # type: ignore[assignment]

    def read_layout(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        rows = kwargs.pop("rows", None)
        layout.rows = None if rows is None else rows.clamp(min=0)
        if rows is not None:
            layout.places = kwargs.pop("places")
            if not takes_positions:
                del kwargs["position_ids"]
        if config.model_type not in OWN_ATTENTION:
            config._attn_implementation = "sdpa" if rows is None else NAME
        return args, kwargs

    model.register_forward_pre_hook(read_layout, with_kwargs=True)


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention within each question. query, key, value: (1, H, T, K); key and value may have fewer heads."""
    heads = (query, key, value)
    query, key, value = (
        module.layout.pad(each.transpose(1, 2).flatten(2)).unflatten(-1, (each.shape[1], -1)).transpose(1, 2)
        for each in heads
    )  # (B, H, L, K)
    output, _ = sdpa_attention_forward(module, query, key, value, None, **kwargs | {"is_causal": True})  # (B, L, H, K)
    return module.layout.unpad(output.flatten(2)).unflatten(-1, output.shape[2:]), None  # (1, T, H, K)


AttentionInterface.register(NAME, attention)
