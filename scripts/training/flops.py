"""Tokens and floating-point operations of a training, and the share of the hardware's peak that it reaches.

Model FLOPs utilisation (MFU) is that of PaLM (arXiv:2204.02311, appendix B): operations that the model needs for
forward and backward pass, over those that the hardware could do in that time. What is computed again (activation
checkpointing) or for padding takes time, and is no work. The hardware's peak is the one that its maker publishes for
dense matrices, as in other people's numbers of MFU. On hardware that is not in the table, such as a CPU, each run times
a product of two matrices for half a second. So the peak, and with it MFU, differs a little between runs on a CPU.
"""

import re
import statistics
from typing import Any

import torch

from data_loader import IGNORED
from distributed.collectives import broadcast_from_rank_0, gather_lists, wait_for_all_ranks
from model import elements
from records.writer import RunRecord

KINDS_OF_TOKENS = 4  # of count_tokens
CPU_SIZE = 1024  # of the square matrices
GPU_SIZE = 8192
SECONDS = 0.5
# Of fp16 and bf16, of tf32, of fp32: 10^12 operations per second, dense, with sums in fp32. From NVIDIA's data sheets
# and, for GeForce, white papers; half of a number that they give with sparsity alone. The first entry whose words are
# all in the GPU's name counts
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
OTHER_CARDS = {"MIG", "GRID", "Laptop", "Ti", "D", "FHHL", "64GB"}  # in a name: another card, or a part of one


def count_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of a batch, as int64 (4): real tokens, padding, labels that count in the loss, sum of the squared lengths."""
    mask = batch["attention_mask"]
    lengths = mask.sum(1)
    real = lengths.sum()
    counted = (batch["labels"][:, 1:] != IGNORED).sum()  # the first label is the target of no position
    return torch.stack([real, mask.numel() - real, counted, (lengths * lengths).sum()])


class ModelFlops:
    """Operations of a model: 6 for each parameter that computes and each token, of them 4 in the backward pass.

    An embedding looks its rows up and computes nothing. The head is needed for the tokens that count in the loss alone.
    """

    def __init__(self, model: Any):
        """model: a causal LM of transformers that is not wrapped yet, as FSDP shows each rank's share alone.

        Raises ValueError with the reason for a model that this does not hold for.
        """
        config = model.config.get_text_config()
        if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
            raise ValueError("of the model's experts only some compute for a token")
        head = model.get_output_embeddings().weight
        tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        self.head = elements(head)
        self.trunk = sum(elements(p) for p in model.parameters() if p is not head and id(p) not in tables)
        self.attention = config.num_hidden_layers * config.hidden_size

    def needed(self, real: int, counted: int, squares: int) -> float:
        """Operations for so many tokens, as `count_tokens` counts them."""
        # 12 for each layer, unit of the hidden size and pair of tokens: scores and weighted sums, forward and backward
        return 6.0 * self.trunk * real + 6.0 * self.head * counted + 12.0 * self.attention * squares


def flops_of(model: Any, record: RunRecord) -> ModelFlops | None:
    """None where nobody knows what the model needs; the record then says why."""
    try:
        return ModelFlops(model)
    except ValueError as error:
        record.reasons["train.mfu_percent"] = str(error)
        return None


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of one rank at best: published, otherwise measured. Collective."""
    if device.type == "cuda":
        tf32 = torch.backends.fp32_precision == "tf32"  # type: ignore[attr-defined]  # set by --tf32
        precision = "tf32" if tf32 and dtype == torch.float32 else str(dtype).removeprefix("torch.")
        # the peak of rank 0's GPU, even if other ranks have another GPU: either all ranks measure, or none
        published = broadcast_from_rank_0(published_peak(torch.cuda.get_device_name(), precision))
        if published:
            return published
    return measured_peak(dtype, device)


def published_peak(gpu: str, precision: str) -> float | None:
    """Operations per second of a GPU by the name that PyTorch gives it; None where the table has none."""
    words = set(re.split(r"[ -]", gpu))
    if words & OTHER_CARDS or any(re.fullmatch(r"[0-9]+[QC]", word) for word in words):  # the latter: of a vGPU
        return None
    for name, peaks in PUBLISHED_PEAKS.items():
        if words >= set(name.split()):
            tflops = peaks[COLUMN[precision]]
            return tflops and tflops * 1e12
    return None


def measured_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Mean operations per second of the ranks, while all of them multiply matrices. Collective."""
    wait_for_all_ranks()
    peak = statistics.fmean(own for (own,) in gather_lists([measure_peak(dtype, device)]))
    if torch.cuda.is_available():  # the matrices do not count in the training's memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return peak


def measure_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of the fastest of the products that half a second has room for."""
    from torch.utils.benchmark import Timer  # only here, as it takes a while

    size = GPU_SIZE if device.type == "cuda" else CPU_SIZE
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    matrices = {"a": a, "b": b, "out": torch.empty_like(a)}
    timer = Timer("torch.mm(a, b, out=out)", globals=matrices, num_threads=torch.get_num_threads())
    return 2 * size**3 / min(timer.blocked_autorange(min_run_time=SECONDS).times)
