"""Measured memory of a training run: bytes of the model state per rank, and the peaks of GPU and process."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from distributed.collectives import gather_lists
from distributed.inspect_fsdp import local, unit_group
from records.writer import RunRecord


def model_state_bytes(trainer: Any, has_gradients: bool) -> dict[str, int | None]:
    """Return the bytes of this rank's live tensors. A storage that several tensors share counts once."""
    optimizer = trainer.deepspeed.optimizer if trainer.is_deepspeed_enabled else trainer.optimizer.optimizer
    # ds_tensor is this rank's shard under ZeRO-3
    parameters = storages(getattr(p, "ds_tensor", p) for p in trainer.model.parameters())
    state = storages(optimizer_tensors(optimizer))
    for storage in parameters:
        state.pop(storage, None)  # fp32 weights are their own masters, so they count as parameters
    gradients = sum(storages(gradient_tensors(trainer.model, optimizer)).values()) if has_gradients else None
    return {"parameters": sum(parameters.values()), "gradients": gradients, "optimizer_state": sum(state.values())}


def gradient_tensors(model: torch.nn.Module, optimizer: Any) -> list:
    """Return all gradients, wherever FSDP2 or DeepSpeed keeps them. Some entries are None."""
    gradients = [p.grad for p in model.parameters()]
    for unit in [unit_group(m) for m in model.modules() if isinstance(m, FSDPModule)]:
        for parameter in unit.fsdp_params if unit else []:  # gradients are unsharded while they accumulate
            gathered = getattr(parameter, "_unsharded_param", None)  # exists once the forward pass has used the unit
            gradients += [parameter.unsharded_accumulated_grad, getattr(gathered, "grad", None)]
    for name in ("all_grad_tensors", "accumulated_grads_in_cpu"):  # ZeRO-2 without and with offload
        for value in getattr(optimizer, name, {}).values():
            gradients += value if isinstance(value, list) else [value]
    return [*gradients, getattr(optimizer, "grad_partitions_flat_buffer", None)]  # ZeRO-3


def optimizer_tensors(optimizer: Any) -> list:
    """Return the moments, and the fp32 masters that the optimizer updates."""
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors = [t for state in inner.state.values() for t in state.values()]
    tensors += [p for group in inner.param_groups for p in group["params"]]
    return [*tensors, *getattr(optimizer, "fp32_partitioned_groups_flat", [])]


def storages(tensors: Iterable) -> dict[int, int]:
    """Map the address of each storage to its size."""
    found = [local(tensor).untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def record_model_state(counted: dict[str, int | None] | None, record: RunRecord) -> None:
    """Record the result of `model_state_bytes` on all ranks. Collective."""
    ranks = [counted for (counted,) in gather_lists([counted])]
    if None in ranks:
        record.missing("held", "the training had no second step")
        return
    if ranks[0]["gradients"] is None:
        record.reasons["held.gradients"] = "without accumulation, DeepSpeed frees them within the step"
    record.update(held=ranks)


def record_peaks(record: RunRecord) -> None:
    """Record the peaks so far of each rank's GPU memory, pinned memory and process. Collective."""
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
    record.update(peak_gpu_memory=[gpu for gpu, _ in ranks], peak_pinned_memory=[pinned for _, pinned in ranks])


def record_process_peaks(record: RunRecord) -> None:
    """Record the peak memory of each rank's process so far. Collective."""
    peaks = [peak for (peak,) in gather_lists([peak_process_mib()])]
    if None in peaks:
        record.missing("peak_process_mib", "this system does not count it")
    else:
        record.update(peak_process_mib=peaks)


def peak_process_mib() -> float | None:
    """Return the largest resident memory of this process so far, or None if the kernel does not report it.

    getrusage's ru_maxrss is not used, because exec does not reset it: it can be the peak of the program that started
    this one.
    """
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    return round(int(found[1]) / 1024, 1) if found else None


def mib(size: int) -> float:
    return round(size / 2**20, 1)
