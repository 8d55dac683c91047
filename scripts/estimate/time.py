"""Predict the seconds of an optimizer step: computing, optimizer and communication.

Computing follows the roofline model (doi:10.1145/1498765.1498785). Each operation of a micro batch takes the longer of
two times: its arithmetic at the speed of matrix products, and its bytes at the speed of the memory. The seconds of
the optimizer and of the communication are their bytes divided by a bandwidth.
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
from estimate.communication import sent_bytes
from estimate.model_shape import (
    FP32,
    HALF,
    ForwardPass,
    Shape,
    autocast,
    device_rules,
    forward_pass,
    model_without_storage,
    trace_shape,
    tracing_errors,
    weight_bytes,
)
from settings.settings import Settings
from shared.errors import WorkshopError
from shared.units import GB

Work = Counter[tuple[int, int]]  # (arithmetic operations, bytes) of an operator -> how often the operator runs
# Bytes for each fp32 parameter. A fused Adam reads weight, gradient and two moments, and writes all but the gradient.
# Clipping reads the gradient for its norm, and then reads and writes it
OPTIMIZER_BYTES = (7 + 3) * FP32
BACKWARD = 2 / 3  # the backward pass's fraction of the time of both passes
# Products of experts, for which PyTorch has no formula: operations per element of the tokens and output of an expert
EXPERTS = {"grouped_mm_fallback": 2, "grouped_mm_fallback_backward": 4}
# Operators that return another view of a tensor, or memory without content
FREE = ("detach", "_unsafe_view", "alias", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided")


@dataclass(frozen=True)
class Rates:
    """Speeds of one rank while all ranks work. bus: the bus bandwidth of nccl-tests, infinite if it is not known."""

    matmul: float  # operations per second
    memory: float  # bytes per second, read and written together
    bus: float  # bytes per second


@dataclass(frozen=True)
class Step:
    """Seconds of an optimizer step. hidden: the part of the communication that overlaps with the computing."""

    compute: float
    optimizer: float
    communication: float
    hidden: float

    @property
    def seconds(self) -> float:
        return self.compute + self.optimizer + self.communication - self.hidden


def read_rates(settings: Settings) -> Rates | None:
    """Return the rates of the flags, or None unless --matmul_tflops and --memory_bandwidth are given."""
    given = settings.estimate
    if not given.matmul_tflops or not given.memory_bandwidth:
        return None
    return Rates(
        matmul=given.matmul_tflops * 1e12,
        memory=given.memory_bandwidth * GB,
        bus=(given.bus_bandwidth or float("inf")) * GB,
    )


def predict_step(settings: Settings, rates: Rates) -> Step:
    """Predict a step with sequences of --max_length tokens.

    Raises WorkshopError (exit code 2) for a training run whose time cannot be predicted.
    """
    check_optimizer(settings)
    if settings.trainer.torch_compile:
        what = "fuses operations, and the time of fused operations is not known"
        raise settings.error("torch_compile", what, "leave it out")
    if settings.model.tensor_parallel > 1:
        what = "the time that ranks wait for each other in each block is not known"
        raise settings.error("tensor_parallel", what, "measure it with --max_steps 10")
    if uses_offload(settings):
        way_out = "use a config without offload, and measure the cost of offload with --max_steps 10"
        raise WorkshopError("offload", "the speed of the CPU and its memory is not known", way_out)
    shape = trace_shape(settings)
    work = micro_batch_work(settings)
    compute = settings.trainer.gradient_accumulation_steps * roofline_seconds(work, rates)
    communication = sent_bytes(shape, settings) / rates.bus
    return Step(
        compute=compute,
        optimizer=optimizer_seconds(shape, settings, rates),
        communication=communication,
        hidden=min(communication, hideable_seconds(settings, compute)),
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
        # Use the unfused attention, because PyTorch counts no operations of the CPU's fused kernel
        with sdpa_kernel(SDPBackend.MATH), counting, device_rules(forward.on_cpu):
            with autocast(forward):
                loss = model(input_ids=tokens, attention_mask=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
    return counting.work


class CountWork(TorchDispatchMode):
    """Count the work of each operator that PyTorch calls, in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Work = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not (func.is_view or name in FREE or func.namespace == "prim"):  # prim: queries such as a tensor's device
            formula = flop_registry.get(func.overloadpacket)
            operations = formula(*args, **kwargs, out_val=result) if formula else 0
            if name in EXPERTS:
                operations = EXPERTS[name] * args[0].numel() * args[1].shape[-1]
            self.work[operations, tensor_bytes(args) + tensor_bytes(result)] += 1
        return result


def tensor_bytes(tree: object) -> int:
    """Add up the bytes of all tensors in a tree. An expanded tensor counts with the bytes that it stores."""
    tensors = [value for value in tree_leaves(tree) if isinstance(value, torch.Tensor)]
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


def roofline_seconds(work: Work, rates: Rates) -> float:
    return sum(
        times * max(operations / rates.matmul, moved / rates.memory) for (operations, moved), times in work.items()
    )


# 2. The optimizer


def optimizer_seconds(shape: Shape, settings: Settings, rates: Rates) -> float:
    """Predict the seconds in which clipping and Adam read and write a rank's shard of the trained parameters."""
    ranks = 1
    passes = OPTIMIZER_BYTES
    if settings.fsdp_config is not None:
        ranks = settings.fsdp_config["dp_shard_size"]
    if settings.deepspeed_config is not None:
        if settings.zero.get("stage", 0) > 0:
            ranks = settings.estimate.gpus
        if weight_bytes(settings) == HALF:
            passes += 2 * (HALF + FP32)  # cast gradients to fp32, and masters to 16 bits
    return passes * shape.trainable / ranks / rates.memory


# 3. Communication during the computing


def hideable_seconds(settings: Settings, compute: float) -> float:
    """Return the seconds of the computing in which communication can run.

    DDP sends in the backward pass of a step's last micro batch, and FSDP in all passes. ZeRO-1 to ZeRO-3 send in all
    passes if `overlap_comm` is true, which is the default of ZeRO-3. ZeRO-0 sends after the passes.
    """
    if settings.fsdp_config is not None:
        return compute
    if settings.deepspeed_config is None:
        return BACKWARD * compute / settings.trainer.gradient_accumulation_steps
    stage = settings.zero.get("stage", 0)
    return compute if stage > 0 and settings.zero.get("overlap_comm", stage == 3) else 0
