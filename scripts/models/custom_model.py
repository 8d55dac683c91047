"""A complete GPT in one file: embeddings of tokens and positions, pre-norm blocks, and a tied head.

    python scripts/train.py --model_name custom-gpt --num_layers 3 --hidden_size 2048
    python scripts/train.py --model_name custom-gpt --vocab_size 2048 --hidden_size 64 --num_heads 4 --ff_dim 256

It is a model of transformers, so the Trainer, DeepSpeed, FSDP, saving, loading and generate() work as usual.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from config import CUSTOM_GPT, DEFAULTS
from models.padding_free import PADDED


class CustomGPTConfig(PreTrainedConfig):
    """Sizes of the model under the workshop's names. The names that transformers uses are aliases."""

    model_type = CUSTOM_GPT
    attribute_map = {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "ff_dim",
        "max_position_embeddings": "seq_length",
    }
    vocab_size: int = DEFAULTS["vocab_size"]
    hidden_size: int = DEFAULTS["hidden_size"]
    num_layers: int = DEFAULTS["num_layers"]
    num_heads: int = DEFAULTS["num_heads"]
    ff_dim: int = DEFAULTS["ff_dim"]
    seq_length: int = DEFAULTS["seq_length"]
    tie_word_embeddings: bool = True
    # Cuts for tensor parallelism (docs/tensor-parallel.md): "colwise" cuts a matrix by outputs, and so by heads.
    # "rowwise" cuts it by inputs. Embedding and head are cut by tokens of the vocabulary. Other weights are not cut
    base_model_tp_plan = {
        "tokens": "embedding_rowwise",
        "blocks.*.attention.q": "colwise",
        "blocks.*.attention.k": "colwise",
        "blocks.*.attention.v": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.ff_in": "colwise",
        "blocks.*.ff_out": "rowwise",
        "head": "colwise_gather_output",
    }


class Attention(nn.Module):
    """Causal self-attention with PyTorch's scaled_dot_product_attention and a key-value cache."""

    layout = PADDED

    def __init__(self, config: CustomGPTConfig, layer: int):
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        self.layer = layer
        self.q = nn.Linear(config.hidden_size, config.hidden_size)
        self.k = nn.Linear(config.hidden_size, config.hidden_size)
        self.v = nn.Linear(config.hidden_size, config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, cache: DynamicCache | None) -> torch.Tensor:
        """Attend to all tokens that the mask allows, or without a mask to all earlier tokens.

        x: (batch, new tokens, hidden). mask: (batch, 1, new tokens, all tokens), True where attention is allowed.
        """
        q, k, v = (self.split_heads(self.layout.pad(layer(x))) for layer in (self.q, self.k, self.v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(self.layout.unpad(x.transpose(1, 2).flatten(2)))

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape (batch, tokens, heads of this rank x head size) to (batch, heads of this rank, tokens, head size)."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class CustomGPTBlock(nn.Module):
    """One transformer layer: the unit that FSDP shards, gathers and frees as a whole."""

    def __init__(self, config: CustomGPTConfig, layer: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config, layer)
        self.ff_norm = nn.LayerNorm(config.hidden_size)
        self.ff_in = nn.Linear(config.hidden_size, config.ff_dim)
        self.ff_out = nn.Linear(config.ff_dim, config.hidden_size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, cache: DynamicCache | None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), mask, cache)
        return x + self.ff_out(F.gelu(self.ff_in(self.ff_norm(x))))


class CustomGPTForCausalLM(PreTrainedModel, GenerationMixin):
    layout = PADDED
    config_class = CustomGPTConfig
    base_model_prefix = ""
    _input_embed_layer = "tokens"
    _no_split_modules = ["CustomGPTBlock"]
    _tied_weights_keys = {"head.weight": "tokens.weight"}
    _supports_sdpa = True

    def __init__(self, config: CustomGPTConfig):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.seq_length, config.hidden_size)
        self.blocks = nn.ModuleList(CustomGPTBlock(config, layer) for layer in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits (batch, tokens, vocabulary), and the mean loss over labels that are not -100.

        input_ids: (batch, tokens); with a cache, only the new tokens. attention_mask: (batch, all tokens), 0 for
        padding. labels: (batch, tokens), not shifted. logits_to_keep: compute logits only for this number of last
        tokens; 0 for all tokens.
        """
        past_key_values = kwargs.pop("cache", past_key_values)  # generate() of transformers 5.24 calls it cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        done = past_key_values.get_seq_length() if past_key_values is not None else 0
        batch, length = input_ids.shape
        if attention_mask is None:
            attention_mask = input_ids.new_ones(batch, done + length)
        if position_ids is None:
            # Padding on the left must not shift the positions of the real tokens
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        x = self.tokens(input_ids) + self.positions(position_ids)
        mask = causal_mask(attention_mask, length) if self.layout.rows is None else None
        for block in self.blocks:
            x = block(x, mask, past_key_values)
        logits = self.head(self.norm(x)[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)


def causal_mask(attention_mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return the attention mask of the last `length` tokens: (batch, 1, length, all tokens), True where allowed.

    A token attends to itself and to earlier tokens that are not padding. A token of padding also attends to itself,
    because the softmax of an empty row would be NaN.
    """
    total = attention_mask.shape[-1]
    queries = torch.arange(total - length, total, device=attention_mask.device)[:, None]
    keys = torch.arange(total, device=attention_mask.device)
    seen = (keys <= queries) & attention_mask[:, None, None, :].bool()
    return seen | (keys == queries)


AutoConfig.register(CUSTOM_GPT, CustomGPTConfig)
AutoModelForCausalLM.register(CustomGPTConfig, CustomGPTForCausalLM)
