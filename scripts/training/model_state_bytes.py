"""What each rank holds of parameters, gradients and optimizer state, in bytes, counted once while it trains."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from distributed.inspect_fsdp import local, unit_group


class HeldCallback(TrainerCallback):
    """Counts between two backward passes of the second step: then gradients are accumulated, and the optimizer has its
    state. Without accumulation right before that optimizer step, where DeepSpeed has dropped its gradients already."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.first = 0  # step that the training begins or goes on from
        self.bytes: dict[str, int | None] | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.first = state.global_step

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step > self.first and self.bytes is None:
            self.bytes = held_by(self.trainer, has_gradients=True)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step > self.first and self.bytes is None:
            self.bytes = held_by(self.trainer, has_gradients=not args.deepspeed)


def held_by(trainer: Any, has_gradients: bool) -> dict[str, int | None]:
    """Bytes of the storages that the live tensors of this rank stand on, each counted once."""
    optimizer = trainer.deepspeed.optimizer if trainer.is_deepspeed_enabled else trainer.optimizer.optimizer
    parameters = storages(parameters_of(trainer.model))
    state = storages(states_of(optimizer))
    for storage in parameters:
        state.pop(storage, None)  # fp32 weights are their own masters
    gradients = sum(storages(gradients_of(trainer.model, optimizer)).values()) if has_gradients else None
    return {"parameters": sum(parameters.values()), "gradients": gradients, "optimizer_state": sum(state.values())}


def parameters_of(model: torch.nn.Module) -> list:
    return [getattr(p, "ds_tensor", p) for p in model.parameters()]  # ds_tensor: the share of ZeRO-3


def gradients_of(model: torch.nn.Module, optimizer: Any) -> list:
    gradients = [p.grad for p in model.parameters()]
    for unit in [unit_group(m) for m in model.modules() if isinstance(m, FSDPModule)]:
        for parameter in unit.fsdp_params if unit else []:  # whole while they accumulate
            gathered = getattr(parameter, "_unsharded_param", None)  # of a unit that the forward pass has used
            gradients += [parameter.unsharded_accumulated_grad, getattr(gathered, "grad", None)]
    for name in ("all_grad_tensors", "accumulated_grads_in_cpu"):  # ZeRO-2, and with offload
        for value in getattr(optimizer, name, {}).values():
            gradients += value if isinstance(value, list) else [value]
    return [*gradients, getattr(optimizer, "grad_partitions_flat_buffer", None)]  # ZeRO-3


def states_of(optimizer: Any) -> list:
    """Moments, and the fp32 masters that the optimizer updates."""
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors = [t for state in inner.state.values() for t in state.values()]
    tensors += [p for group in inner.param_groups for p in group["params"]]
    return [*tensors, *getattr(optimizer, "fp32_partitioned_groups_flat", [])]


def storages(tensors: Iterable) -> dict[int, int]:
    """Address and size of each."""
    found = [local(tensor).untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}
