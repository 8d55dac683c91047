"""The memory that a training used: the bytes of its model state per rank, and the peaks of GPU and process."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distributed.collectives import gather_lists
from distributed.inspect_fsdp import local, unit_group
from records.writer import RunRecord


class ModelStateCallback(TrainerCallback):
    """Counts the bytes of parameters, gradients and optimizer state once, and records those of all ranks (`held`).

    It counts between two backward passes of the second step: then gradients are accumulated, and the optimizer has its
    state. Without accumulation it counts right before that optimizer step, where DeepSpeed has dropped its gradients
    already.
    """

    def __init__(self, trainer: Any, record: RunRecord):
        self.trainer = trainer
        self.record = record
        self.counted: dict[str, int | None] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.first_step = state.global_step  # that the training begins at or resumes from

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step > self.first_step and self.counted is None:
            self.counted = model_state_bytes(self.trainer, has_gradients=True)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step > self.first_step and self.counted is None:
            self.counted = model_state_bytes(self.trainer, has_gradients=not args.deepspeed)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        ranks = [counted for (counted,) in gather_lists([self.counted])]
        if None in ranks:
            self.record.missing("held", "the training had no second step")
            return
        if ranks[0]["gradients"] is None:
            self.record.reasons["held.gradients"] = "DeepSpeed drops them in the step, without accumulation"
        self.record.update(held=ranks)


def model_state_bytes(trainer: Any, has_gradients: bool) -> dict[str, int | None]:
    """Bytes of the storages of the live tensors of this rank, each counted once."""
    optimizer = trainer.deepspeed.optimizer if trainer.is_deepspeed_enabled else trainer.optimizer.optimizer
    # ds_tensor: the share of ZeRO-3
    parameters = storages(getattr(p, "ds_tensor", p) for p in trainer.model.parameters())
    state = storages(optimizer_tensors(optimizer))
    for storage in parameters:
        state.pop(storage, None)  # fp32 weights are their own masters
    gradients = sum(storages(gradient_tensors(trainer.model, optimizer)).values()) if has_gradients else None
    return {"parameters": sum(parameters.values()), "gradients": gradients, "optimizer_state": sum(state.values())}


def gradient_tensors(model: torch.nn.Module, optimizer: Any) -> list:
    gradients = [p.grad for p in model.parameters()]
    for unit in [unit_group(m) for m in model.modules() if isinstance(m, FSDPModule)]:
        for parameter in unit.fsdp_params if unit else []:  # whole while they accumulate
            gathered = getattr(parameter, "_unsharded_param", None)  # of a unit that the forward pass has used
            gradients += [parameter.unsharded_accumulated_grad, getattr(gathered, "grad", None)]
    for name in ("all_grad_tensors", "accumulated_grads_in_cpu"):  # ZeRO-2, and with offload
        for value in getattr(optimizer, name, {}).values():
            gradients += value if isinstance(value, list) else [value]
    return [*gradients, getattr(optimizer, "grad_partitions_flat_buffer", None)]  # ZeRO-3


def optimizer_tensors(optimizer: Any) -> list:
    """Moments, and the fp32 masters that the optimizer updates."""
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors = [t for state in inner.state.values() for t in state.values()]
    tensors += [p for group in inner.param_groups for p in group["params"]]
    return [*tensors, *getattr(optimizer, "fp32_partitioned_groups_flat", [])]


def storages(tensors: Iterable) -> dict[int, int]:
    """Address and size of each storage."""
    found = [local(tensor).untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def record_peaks(record: RunRecord) -> None:
    """Record the peaks so far: of each rank's GPU, its pinned memory and its process. Collective."""
    record_process_peaks(record)
    if not torch.cuda.is_available():
        record.missing("peak_gpu_memory", "no GPU")
        record.missing("peak_pinned_memory", "no GPU")
        return
    blocks = torch.cuda.host_memory_stats()
    gpu = {
        "allocated_mib": mib(torch.cuda.max_memory_allocated()),
        "reserved_mib": mib(torch.cuda.max_memory_reserved()),
    }
    pinned = {f"{kind}_mib": mib(blocks[f"{kind}_bytes.peak"]) for kind in ("active", "allocated")}
    ranks = gather_lists([gpu, pinned])
    record.update(
        peak_gpu_memory=[of_gpu for of_gpu, _ in ranks], peak_pinned_memory=[of_blocks for _, of_blocks in ranks]
    )


def record_process_peaks(record: RunRecord) -> None:
    """Record the peak of each rank's process so far. Collective."""
    peaks = [peak for (peak,) in gather_lists([peak_process_mib()])]
    if None in peaks:
        record.missing("peak_process_mib", "this system does not count it")
    else:
        record.update(peak_process_mib=peaks)


def peak_process_mib() -> float | None:
    """Largest resident memory of this process so far, None where the kernel does not tell.

    getrusage's ru_maxrss also holds that of the program which started this one: an exec leaves it as it was.
    """
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    return round(int(found[1]) / 1024, 1) if found else None


def mib(size: int) -> float:
    return round(size / 2**20, 1)
