"""Tokens and floating-point operations of a training run, and the share of the hardware's peak that it reaches.

Model FLOPs utilisation (MFU) is defined as in PaLM (arXiv:2204.02311, appendix B): the operations that the model needs
for forward and backward pass, divided by the operations that the hardware could do in the same time. Recomputation
(activation checkpointing) and padding take time, but do not count as needed operations.

The hardware's peak is the manufacturer's number for dense matrices, as in other publications of MFU. On hardware that
is not in the table, such as a CPU, each run times a product of two matrices for a fifth of a second. So the peak of a
CPU, and with it MFU, differs slightly between runs.
"""

import re
import statistics
from collections import Counter
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from config import IGNORED
from distributed.collectives import broadcast_from_rank_0, gather_lists, wait_for_all_ranks
from records.writer import RunRecord

KINDS_OF_TOKENS = 4  # length of the result of count_tokens
WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")  # in config.json: tokens that a token can see
CPU_SIZE = 1024  # rows and columns of the matrices that are multiplied to measure the peak
GPU_SIZE = 8192
SECONDS = 0.2
# 10^12 operations per second with dense matrices and sums in fp32: for fp16 and bf16, for tf32, for fp32. The numbers
# are from NVIDIA's data sheets and, for GeForce, white papers. Where these give a number only with sparsity, half of it
# is used. The first entry whose words are all in the GPU's name applies
PUBLISHED_PEAKS = {
    "V100 PCIE": (112, None, 14),
    "V100": (125, None, 15.7),
    "T4": (65, None, 8.1),
    "A100": (312, 156, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "L40S": (362, 183, 91.6),
    "H100 PCIe": (756, 378, 51),
    "H100 NVL": (835, 417, 60),
    "H100": (989, 494, 67),
    "GH200": (989, 494, 67),
    "H200 NVL": (835, 417, 60),
    "H200": (989, 494, 67),
    "B200": (2250, 1125, 75),
    "GB200": (2500, 1250, 80),
    "RTX 3090": (71, 35.6, 35.6),
    "RTX 4090": (165.2, 82.6, 82.6),
}
COLUMN = {"float16": 0, "bfloat16": 0, "tf32": 1, "float32": 2}
# Words in a GPU's name that mean a different card than the one in the table, or a part of a card
OTHER_CARDS = {"MIG", "GRID", "Laptop", "Ti", "D", "FHHL", "64GB"}


def count_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Count a batch's real tokens, padding, labels that count in the loss, and sum of squared lengths: (4), int64."""
    labels = batch["labels"]
    lengths = (batch["rows"] >= 0 if "rows" in batch else batch["attention_mask"]).sum(1)
    real = lengths.sum()
    counted = (labels[:, 1:] != IGNORED).sum()  # the first label is the target of no position
    return torch.stack([real, labels.numel() - real, counted, (lengths * lengths).sum()])


class ModelFlops:
    """Number of operations of a model: 6 per token and element of a matrix, 4 of them in the backward pass.

    A frozen matrix needs 4, because the backward pass computes no gradient of it. Embeddings do not count, because
    they only look up rows. The head counts only for the tokens that count in the loss.
    """

    def __init__(self, model: Any, max_length: int):
        """Raise ValueError with the reason if the number of operations is unknown for this kind of model.

        model: a causal LM of transformers with whole weights, not a shard. It may be on the meta device. max_length:
        tokens of the longest sequence.
        """
        if others := list(other_matrices(model)):
            raise ValueError(f"{others[0]} is not the weight of a linear layer, so its operations are unknown")
        head = model.get_output_embeddings().weight
        tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        matrices = [p for p in model.parameters() if p.dim() > 1 and p is not head and id(p) not in tables]
        self.head = operations_per_token(head)
        self.trunk = sum(operations_per_token(matrix) for matrix in matrices)
        self.attention = attention_width(model, max_length)

    def count_operations(self, real: int, counted: int, squares: int) -> float:
        """Return the number of operations for the counts of `count_tokens`."""
        # For each pair of tokens, attention needs 12 operations per unit of its width: for scores and weighted sums, in
        # forward and backward pass
        return float(self.trunk * real + self.head * counted + 12 * self.attention * squares)


def operations_per_token(parameter: torch.nn.Parameter) -> int:
    return (6 if parameter.requires_grad else 4) * parameter.numel()


def other_matrices(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the matrices, by name, of layers that are neither linear nor an embedding, such as experts or Mamba's.

    Such a matrix may not be multiplied once with each token.
    """
    return {
        f"{layer}.{name}": parameter
        for layer, module in model.named_modules()
        if not isinstance(module, (torch.nn.Linear, Conv1D, torch.nn.Embedding))
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1
    }


def tokens_in_sight(model: Any, max_length: int) -> int:
    """Return the number of tokens that a token can see: max_length, or fewer if the model has a sliding window."""
    config = model.config.get_text_config()
    return min(max_length, *(getattr(config, name, None) or max_length for name in WINDOWS))


def attention_width(model: Any, max_length: int) -> int:
    """Return the sum of heads x head size over all layers.

    Raise ValueError unless every layer has one attention of this size, in which a token can see all earlier tokens.
    """
    config = model.config.get_text_config()
    window = tokens_in_sight(model, max_length)
    if window < max_length:
        raise ValueError(f"the attention sees only {window} tokens at a time, and MAX_LENGTH is {max_length}")
    heads = getattr(config, "num_attention_heads", None) or 1
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    layers_by_class = Counter(type(module) for module in model.modules() if is_attention(module, width))
    if list(layers_by_class.values()) != [config.num_hidden_layers]:
        raise ValueError("not every layer has one attention of the usual kind, so its operations are unknown")
    return config.num_hidden_layers * width


def is_attention(module: torch.nn.Module, width: int) -> bool:
    """Return whether this is an attention of this width, and of no unusual kind that has parameters of its own.

    One of its linear layers has the outputs of all heads as its input, so the number of inputs is the width.
    """
    inputs = [getattr(layer, "in_features", getattr(layer, "nx", 0)) for layer in module.children()]
    return (
        type(module).__name__.endswith("Attention") and width in inputs and not list(module.parameters(recurse=False))
    )


def model_flops(model: Any, max_length: int, record: RunRecord) -> ModelFlops | None:
    """Return the operations of a model. If they are unknown, return None and write the reason into the record."""
    try:
        return ModelFlops(model, max_length)
    # Configs of unusual models raise AttributeError, or RuntimeError for a value that differs between layers
    except (AttributeError, RuntimeError, ValueError) as error:
        record.reasons["train.mfu_percent"] = str(error)
        return None


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Return the peak operations per second of one rank: published if known, otherwise measured. Collective."""
    if device.type == "cuda":
        tf32 = torch.backends.fp32_precision == "tf32"  # type: ignore[attr-defined]  # set by --tf32
        precision = "tf32" if tf32 and dtype == torch.float32 else str(dtype).removeprefix("torch.")
        # Use the peak of rank 0's GPU even if other ranks have a different GPU: either all ranks measure, or none
        published = broadcast_from_rank_0(published_peak(torch.cuda.get_device_name(), precision))
        if published:
            return published
    return measured_peak(dtype, device)


def published_peak(gpu: str, precision: str) -> float | None:
    """Return the operations per second of a GPU, by its name in PyTorch, or None if the table has no number for it."""
    words = set(re.split(r"[ -]", gpu))
    if words & OTHER_CARDS or any(re.fullmatch(r"[0-9]+[QC]", word) for word in words):  # a vGPU's profile, such as 48Q
        return None
    for name, peaks in PUBLISHED_PEAKS.items():
        if words >= set(name.split()):
            tflops = peaks[COLUMN[precision]]
            return tflops and tflops * 1e12
    return None


def measured_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Return the mean operations per second of all ranks, while all of them multiply matrices. Collective."""
    wait_for_all_ranks()
    peak = statistics.fmean(own for (own,) in gather_lists([measure_peak(dtype, device)]))
    if torch.cuda.is_available():  # the matrices must not count in the training's memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return peak


def measure_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of the fastest matrix product within a fifth of a second."""
    from torch.utils.benchmark import Timer  # imported only here, because the import is slow

    size = GPU_SIZE if device.type == "cuda" else CPU_SIZE
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    matrices = {"a": a, "b": b, "out": torch.empty_like(a)}
    timer = Timer("torch.mm(a, b, out=out)", globals=matrices, num_threads=torch.get_num_threads())
    return 2 * size**3 / min(timer.blocked_autorange(min_run_time=SECONDS).times)
