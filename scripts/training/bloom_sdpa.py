"""BLOOM's attention by PyTorch's scaled_dot_product_attention, for `--attention sdpa`: no matrix of scores in memory.

transformers computes it step by step (eager): scores, their sum with the mask, softmax, dropout, each a tensor of
batch x heads x length x length, in each layer. Here one fused kernel goes through them block by block. It takes what
BLOOM adds to the scores, the distances (alibi) and the mask, as one tensor of that size, made once per forward pass and
shared by all layers.

Written for transformers 5.23 (models/bloom/modeling_bloom.py), whose own switches do not reach BLOOM: neither
attn_implementation="sdpa" nor a function registered with AttentionInterface is looked up by BloomAttention.
"""

from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.bloom import modeling_bloom
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel, build_alibi_tensor, dropout_add

from config import CUSTOM_GPT
from shared.errors import WorkshopError


class SDPABloomModel(BloomModel):
    """Hands its layers the sum of distances and mask, where BloomModel hands them the mask."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        modeling_bloom.create_causal_mask = distances_and_mask  # type: ignore[assignment]  # BLOOM gives only these
        try:
            return super().forward(*args, **kwargs)
        finally:
            modeling_bloom.create_causal_mask = create_causal_mask


class SDPABloomAttention(BloomAttention):
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
        """hidden_states, residual: (batch, length, hidden); attention_mask: of `distances_and_mask`.

        alibi is in the latter already. The second value would be the attention's probabilities, which nobody has here.
        """
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        dropout = self.attention_dropout.p if self.training else 0.0
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=self.inv_norm_factor
        )
        out = self.dense(out.transpose(1, 2).flatten(2))
        return dropout_add(out, residual, self.hidden_dropout, self.training), None


def distances_and_mask(
    config: Any, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, past_key_values: Any
) -> torch.Tensor:
    """What BLOOM adds to the scores: (batch, heads, queries, keys), in the dtype in which attention computes.

    In another dtype autocast, or FSDP, would cast it anew in each layer, and each layer would keep its copy for the
    backward pass.
    """
    mask: Any = create_causal_mask(
        config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, past_key_values=past_key_values
    )
    device = inputs_embeds.device
    dtype = inputs_embeds.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    if attention_mask is None:  # no padding
        attention_mask = torch.ones(len(inputs_embeds), mask.shape[-1], device=device)
    alibi = build_alibi_tensor(attention_mask, config.n_head, dtype)
    alibi = alibi.view(len(inputs_embeds), config.n_head, 1, -1)
    # not by adding the mask: a row that is masked as a whole would be NaN where the sum is minus infinity
    return alibi.masked_fill(mask < 0, torch.finfo(dtype).min)


def attention_name(model: PreTrainedModel) -> str:
    """How the model's attention computes: eager, sdpa, or what else transformers knows."""
    if any(isinstance(module, SDPABloomAttention) for module in model.modules()):
        return "sdpa"
    if model.config.model_type == CUSTOM_GPT:
        return "sdpa"  # written out in custom_model.py
    return model.config.get_text_config()._attn_implementation


def use_attention(model: PreTrainedModel, attention: str | None) -> None:
    """Let the model compute its attention so; None leaves it as it is. Raises WorkshopError (exit code 2)."""
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
        what = f"{type(model).__name__} has no other than {attention_name(model)}"
        raise WorkshopError("--attention", what, "leave it out")
    try:
        model.set_attn_implementation(attention)
    except ValueError as error:
        raise WorkshopError("--attention", str(error).splitlines()[0], "leave it out") from error
