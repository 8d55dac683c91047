"""Seconds of an optimizer step: computing, optimizer and communication.

Computing is a roofline (doi:10.1145/1498765.1498785): each operation of a micro batch takes as long as its arithmetic
at the speed of matrix products, or as long as its tensors at the speed of the memory, whichever is more. The rest is
bytes over bandwidth: of the weights, gradients and moments that the optimizer passes over, and of what a rank sends.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from distributed.ds_config import offloaded
from estimate.command_line import check_optimizer
from estimate.communication import GB, sent_bytes
from estimate.model_shape import (
    FP32,
    HALF,
    ForwardPass,
    Shape,
    autocast,
    forward_pass,
    model_without_storage,
    trace_shape,
    tracing_errors,
    weight_bytes,
)
from settings.settings import Settings
from shared.errors import WorkshopError

Work = Counter[tuple[int, int]]  # (operations of matrix products, bytes) of an operation, and how often it is done
# Bytes for each fp32 parameter: a fused Adam reads weight, gradient and two moments, and writes all but the gradient;
# clipping reads the gradient for its norm, and reads and writes it once more
OPTIMIZER_BYTES = (7 + 3) * FP32
BACKWARD = 2 / 3  # of the time of forward and backward pass
# Operations that give another view of a tensor, or memory without content
FREE = ("detach", "_unsafe_view", "alias", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided")


@dataclass(frozen=True)
class Rates:
    """Speeds of one rank while all ranks work. bus: as nccl-tests defines it, infinite where it is not known."""

    matmul: float  # operations per second
    memory: float  # bytes per second, those read and those written
    bus: float  # bytes per second


@dataclass(frozen=True)
class Step:
    """Seconds of an optimizer step. hidden: the part of the communication that runs during the computing."""

    compute: float
    optimizer: float
    communication: float
    hidden: float

    @property
    def seconds(self) -> float:
        return self.compute + self.optimizer + self.communication - self.hidden


def read_rates(settings: Settings) -> Rates | None:
    """Return the rates that the flags give, or None unless both rates are there that every training needs."""
    given = settings.estimate
    if not given.matmul_tflops or not given.memory_bandwidth:
        return None
    return Rates(
        matmul=given.matmul_tflops * 1e12,
        memory=given.memory_bandwidth * GB,
        bus=(given.bus_bandwidth or float("inf")) * GB,
    )


def predict_step(settings: Settings, rates: Rates) -> Step:
    """Predict a step with sequences of --max_length. Raises WorkshopError (exit code 2) for what is not known."""
    check_optimizer(settings)
    if settings.trainer.torch_compile:
        raise settings.error("torch_compile", "joins operations, and how fast they are is not known", "leave it out")
    if settings.model.tensor_parallel > 1:
        what = "how long the ranks wait for each other in each block is not known"
        raise settings.error("tensor_parallel", what, "measure it with --max_steps 10")
    if uses_offload(settings):
        way_out = "take a config without offload, and measure what offload costs with --max_steps 10"
        raise WorkshopError("offload", "how fast the CPU and its memory are is not known", way_out)
    shape = trace_shape(settings)
    work = micro_batch_work(settings)
    compute = settings.trainer.gradient_accumulation_steps * roofline_seconds(work, rates)
    communication = sent_bytes(shape, settings) / rates.bus
    return Step(
        compute=compute,
        optimizer=optimizer_seconds(shape, settings, rates),
        communication=communication,
        hidden=min(communication, seconds_to_hide(settings, compute)),
    )


def uses_offload(settings: Settings) -> bool:
    by_fsdp = (settings.fsdp_config or {}).get("cpu_offload", False)
    return by_fsdp or offloaded(settings.zero, "optimizer") or offloaded(settings.zero, "param")


# 1. Computing


def micro_batch_work(settings: Settings) -> Work:
    """Count the work of the forward and backward pass of a micro batch."""
    forward = forward_pass(settings)
    with tracing_errors(settings):
        return count_work(forward)


@lru_cache
def count_work(forward: ForwardPass) -> Work:
    """Run both passes on tensors without storage."""
    counting = CountWork()
    with model_without_storage(forward) as model:
        tokens = torch.ones(forward.batch, forward.length, dtype=torch.long)
        # Attention is written out, because PyTorch counts no operations of the CPU's fused kernel
        with sdpa_kernel(SDPBackend.MATH), counting:
            with autocast(forward):
                loss = model(input_ids=tokens, attention_mask=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
    return counting.work


class CountWork(TorchDispatchMode):
    """Note the work of each operation that PyTorch starts, also of those of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Work = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not (func.is_view or name in FREE or func.namespace == "prim"):  # prim: questions such as a tensor's device
            formula = flop_registry.get(func.overloadpacket)
            operations = formula(*args, **kwargs, out_val=result) if formula else 0
            self.work[operations, tensor_bytes(args) + tensor_bytes(result)] += 1
        return result


def tensor_bytes(tree: object) -> int:
    """Bytes of all tensors in a tree; an expanded tensor has as many as it stores."""
    tensors = [value for value in tree_leaves(tree) if isinstance(value, torch.Tensor)]
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


def roofline_seconds(work: Work, rates: Rates) -> float:
    return sum(
        times * max(operations / rates.matmul, moved / rates.memory) for (operations, moved), times in work.items()
    )


# 2. The optimizer


def optimizer_seconds(shape: Shape, settings: Settings, rates: Rates) -> float:
    """Seconds in which clipping and Adam pass over all bytes of a rank's share."""
    ranks = 1
    passes = OPTIMIZER_BYTES
    if settings.fsdp_config is not None:
        ranks = settings.fsdp_config["dp_shard_size"]
    if settings.deepspeed_config is not None:
        if settings.zero.get("stage", 0) > 0:
            ranks = settings.estimate.gpus
        if weight_bytes(settings) == HALF:
            passes += 2 * (HALF + FP32)  # gradients to fp32, and the masters back to 16 bit
    return passes * shape.parameters / ranks / rates.memory


# 3. Communication during the computing


def seconds_to_hide(settings: Settings, compute: float) -> float:
    """Seconds in which communication can run during the computing.

    DDP sends in the backward pass of a step's last micro batch, FSDP and ZeRO-3 in all passes, ZeRO 1 and 2 if
    `overlap_comm` says so, and ZeRO-0 after the passes.
    """
    if settings.fsdp_config is not None:
        return compute
    if settings.deepspeed_config is None:
        return BACKWARD * compute / settings.trainer.gradient_accumulation_steps
    stage = settings.zero.get("stage", 0)
    return compute if stage > 0 and settings.zero.get("overlap_comm", stage == 3) else 0
