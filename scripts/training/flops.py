"""What a training computes: tokens, floating-point operations, and the share of the hardware's peak that it reaches.

Model FLOPs utilisation (MFU) is that of PaLM (arXiv:2204.02311, appendix B): operations that the model needs, for
forward and backward pass, over what the hardware could do in that time. What is computed again (activation
checkpointing), or for padding, is time and no work.
"""

import os
import platform
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from data_loader import IGNORED
from json_files import write_json

TOKENS = ("real", "padding", "counted", "squares")
CPU_SIZE = 1024  # of the square matrices whose product is timed
GPU_SIZE = 8192
SECONDS = 0.5


def count_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of a batch, as int64 (4): real tokens, padding, labels that count in the loss, sum of the squared lengths."""
    lengths = batch["attention_mask"].sum(1)
    real = lengths.sum()
    counted = (batch["labels"][:, 1:] != IGNORED).sum()  # the first label is the target of no position
    return torch.stack([real, batch["attention_mask"].numel() - real, counted, (lengths * lengths).sum()])


class ModelFlops:
    """Operations per token of a model, of which 6 are for each parameter that computes: 2 forward, 4 backward.

    An embedding looks its rows up and computes nothing; the head computes for tokens that count in the loss alone.
    """

    def __init__(self, model: nn.Module):
        """To be called before the model is wrapped. Raises ValueError with the reason for a model it is wrong for."""
        config = model.config.get_text_config()
        if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
            raise ValueError("of its experts only some compute for a token")
        head = model.get_output_embeddings().weight
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        self.head = size(head)
        self.trunk = sum(size(p) for p in model.parameters() if p is not head and id(p) not in tables)
        self.attention = config.num_hidden_layers * config.hidden_size

    def of(self, real: int, counted: int, squares: int) -> float:
        """Operations for forward and backward pass over sequences with so many tokens (see `count_tokens`)."""
        # 12 per layer, unit of the hidden size, and pair of tokens: scores and weighted sums, forward and backward
        return 6 * self.trunk * real + 6 * self.head * counted + 12 * self.attention * squares


def size(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 holds a share of each
