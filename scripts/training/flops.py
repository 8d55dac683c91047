"""What a training computes: tokens, floating-point operations, and the share of the hardware's peak that it reaches.

Model FLOPs utilisation (MFU) is that of PaLM (arXiv:2204.02311, appendix B): operations that the model needs for
forward and backward pass, over those that the hardware could do in that time. What is computed again (activation
checkpointing) or for padding takes time, and is no work. The hardware's peak is not the data sheet's but that of a
product of two matrices, timed here, which is what a perfect training could reach.
"""

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data_loader import IGNORED
from json_files import write_json
from parallel.distributed import gather_lists, local_world_size, rank, same_everywhere, wait_for_everyone
from training.record import RunRecord, hardware

KINDS_OF_TOKENS = 4  # of count_tokens
CPU_SIZE = 1024  # of the square matrices
GPU_SIZE = 8192
COPIED_ON_CPU = 32 * 2**20  # bytes: with the copy more than caches hold, and less than any training takes
COPIED_ON_GPU = 256 * 2**20
SECONDS = 0.5


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
        record.content["missing"]["train.mfu_percent"] = str(error)
        return None


def elements(parameter: torch.Tensor) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 holds a share


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of one rank while all ranks multiply matrices, their mean. Collective."""
    tf32 = torch.backends.fp32_precision == "tf32"  # type: ignore[attr-defined]  # of --tf32
    precision = "tf32" if tf32 and dtype == torch.float32 else dtype
    return measured_once(str(precision), device, lambda: measure_peak(dtype, device))


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second that one rank reads and writes while all ranks copy, their mean. Collective."""
    return measured_once("copy", device, lambda: measure_copy(device))


def measured_once(what: str, device: torch.device, measure: Callable[[], float]) -> float:
    """The mean of what all ranks measure at the same time. Collective.

    Measured once for each kind of hardware, number of ranks and version of PyTorch, and kept in the user's cache.
    """
    known = cached_rates() if rank() == 0 else {}
    machine = hardware(local_world_size())
    name = machine["gpu"] if device.type == "cuda" else f"{machine['cpu']}, {torch.get_num_threads()} threads"
    key = f"{name}, {local_world_size()} ranks per node, torch {torch.__version__}, {what}"
    rate = same_everywhere(known.get(key))
    if rate:
        return rate
    wait_for_everyone()
    rate = statistics.fmean(own for (own,) in gather_lists([measure()]))
    forget_measuring()
    if rank() == 0:
        with contextlib.suppress(OSError):  # no place for it: the next run measures again
            cache_file().parent.mkdir(parents=True, exist_ok=True)
            write_json(cache_file(), known | {key: rate})
    return rate


def measure_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of the fastest of the products that half a second has room for."""
    size = GPU_SIZE if device.type == "cuda" else CPU_SIZE
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / fastest(lambda: torch.mm(a, b, out=out), device)


def measure_copy(device: torch.device) -> float:
    """Bytes per second, those read and those written, of the fastest of the copies that half a second has room for."""
    source = torch.ones(COPIED_ON_GPU if device.type == "cuda" else COPIED_ON_CPU, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / fastest(lambda: target.copy_(source), device)


def fastest(operation: Callable[[], object], device: torch.device) -> float:
    """Seconds that the operation takes at best."""
    on_gpu = device.type == "cuda"
    seconds = float("inf")
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or seconds == float("inf"):
        start = time.perf_counter()
        operation()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = min(seconds, time.perf_counter() - start)
    return seconds


def forget_measuring() -> None:
    """What was measured with is none of the training's memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def cache_file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "distributed-llm-workshop" / "rates.json"


def cached_rates() -> dict[str, float]:
    try:
        content = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    kept = content.items() if isinstance(content, dict) else ()
    return {key: value for key, value in kept if isinstance(value, float) and value > 0}
