"""BLOOM's attention with PyTorch's scaled_dot_product_attention, for `--attention sdpa`, and its GELU as one kernel.

transformers computes BLOOM's attention step by step (eager). Scores, masked scores, softmax and dropout are each a
tensor of batch x heads x length x length, in each layer. Here one fused kernel computes the scores block by block and
never stores all of them. BLOOM adds distances (alibi) and a mask to the scores. The kernel takes their sum as one
tensor of that size, which is created once per forward pass and shared by all layers.

Shapes: B rows of a batch, L tokens of a row, M tokens that it attends to (L, or more with a cache), D hidden size, H
heads, K head size. Without padding, hidden states are (1, T, D) with T tokens, and only the attention has B rows.

This module is written for transformers 5.23 and 5.24 (models/bloom/modeling_bloom.py). Its BloomAttention ignores both
attn_implementation="sdpa" and functions that are registered with AttentionInterface.
"""

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.bloom import modeling_bloom
from transformers.models.bloom.modeling_bloom import (
    BloomAttention,
    BloomGelu,
    BloomModel,
    build_alibi_tensor,
    dropout_add,
)

from config import CUSTOM_GPT
from models.padding_free import NAME, PADDED, Layout
from shared.errors import WorkshopError


class SDPABloomModel(BloomModel):
    """BloomModel that passes the sum of distances and mask to its layers, instead of the mask."""

    layout = PADDED

    # torch.compile would inline this method, and use the mask of transformers, which has no distances
    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        modeling_bloom.create_causal_mask = partial(distances_and_mask, layout=self.layout)
        try:
            return super().forward(*args, **kwargs)
        finally:
            modeling_bloom.create_causal_mask = create_causal_mask


class SDPABloomAttention(BloomAttention):
    layout = PADDED

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        alibi: torch.Tensor,
        attention_mask: torch.Tensor,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the output of the attention, and None in place of the probabilities, which are never computed.

        hidden_states, residual: (B, L, D). attention_mask: the tensor (B, H, L, M) from `distances_and_mask`, which
        already contains alibi.
        """
        # The backward pass of unbind is one kernel. transformers' _reshape selects three times, and needs eight
        fused = self.layout.pad(self.query_key_value(hidden_states)).unflatten(-1, (self.num_heads, 3, self.head_dim))
        # fused is (B, L, H, 3, K)
        query, key, value = (part.transpose(1, 2) for part in fused.unbind(-2))  # (B, H, L, K)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)  # (B, H, M, K)
        dropout = self.attention_dropout.p if self.training else 0.0
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=self.inv_norm_factor
        )  # (B, H, L, K)
        out = self.dense(self.layout.unpad(out.transpose(1, 2).flatten(2)))  # (B, L, D) or (1, T, D)
        return dropout_add(out, residual, self.hidden_dropout, self.training), None


class FusedGelu(BloomGelu):
    """BLOOM's GELU as one kernel.

    transformers computes it in 8 kernels and its gradient in 18, and squares x. In fp16 this gradient is NaN if x is
    783 or more.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")


def distances_and_mask(
    config: Any,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layout: Layout = PADDED,
    **cache: Any,
) -> torch.Tensor:
    """Return the tensor (B, H, L, M) that BLOOM adds to the scores, in the dtype of the attention.

    With another dtype, autocast or FSDP would cast the tensor again in each layer, and each layer would keep its copy
    for the backward pass. Without padding, all questions have the same tensor, and B is 1.
    cache: the keys and values of earlier tokens, named past_key_values, in transformers 5.24 named cache.
    """
    device = inputs_embeds.device
    dtype = inputs_embeds.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    if layout.rows is not None:
        inputs_embeds = inputs_embeds.new_empty(1, layout.rows.shape[1], 0)  # (B, L, 0): only B and L are used
    mask: Any = create_causal_mask(config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, **cache)
    # mask is (B, 1, L, M): 0 or the smallest number. attention_mask is (B, M)
    if attention_mask is None:  # no padding
        attention_mask = torch.ones(len(inputs_embeds), mask.shape[-1], device=device)  # (B, M)
    alibi = build_alibi_tensor(attention_mask, config.n_head, torch.float32)  # (B H, 1, M)
    alibi = alibi.view(len(inputs_embeds), config.n_head, 1, -1)  # (B, H, 1, M)
    # alibi is slope x position of the key. The softmax ignores a constant per query, so slope x (key - query) is the
    # same model. It is small for near keys, so 16 bits round it less: bf16 rounds 361 by up to 1
    distances = (alibi - alibi[..., -mask.shape[-2] :].mT).to(dtype)  # (B, H, L, M)
    # Fill instead of adding the mask: the sum can be minus infinity, and a row that is completely masked would be NaN
    return distances.masked_fill(mask < 0, torch.finfo(dtype).min)


def attention_name(model: PreTrainedModel) -> str:
    """Return the name of the model's attention: eager, sdpa, or another name that transformers uses."""
    name = model.config.get_text_config()._attn_implementation
    # custom_model.py calls SDPA directly
    own = name == NAME or model.config.model_type == CUSTOM_GPT
    return "sdpa" if own or any(isinstance(module, SDPABloomAttention) for module in model.modules()) else name


def use_attention(model: PreTrainedModel, attention: str | None) -> None:
    """Set the attention of a model; None keeps the current one. Also fuse BLOOM's GELU, with any attention.

    Raise WorkshopError (exit code 2) if the model does not support the attention.
    """
    for module in model.modules():
        if type(module) is BloomGelu:
            module.__class__ = FusedGelu
    if attention is None or attention == attention_name(model):
        return
    if model.config.model_type == "bloom" and attention == "sdpa":
        for module in model.modules():
            if type(module) is BloomModel:
                module.__class__ = SDPABloomModel
            if type(module) is BloomAttention:
                module.__class__ = SDPABloomAttention
        return
    if not model._can_set_attn_implementation():
        what = f"{type(model).__name__} supports only {attention_name(model)}"
        raise WorkshopError("--attention", what, "leave it out")
    try:
        model.set_attn_implementation(attention)
    except ValueError as error:
        raise WorkshopError("--attention", str(error).splitlines()[0], "leave it out") from error
