"""train.py, which also writes down what each rank holds once a second step has begun: memory-<job id>-<rank>.json.

Measured between two backward passes of that step, when gradients are accumulated and the optimizer has its state.
Bytes of the storages that the live tensors stand on, each counted once.
"""

import json
import os
import sys

sys.path.insert(0, "scripts")
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import train
from parallel.sharding import unit_group


def parameters_of(model) -> list:
    return [getattr(p, "ds_tensor", p) for p in model.parameters()]  # ds_tensor: the share of ZeRO-3


def gradients_of(model, optimizer) -> list:
    gradients = [p.grad for p in model.parameters()]
    for unit in [unit_group(m) for m in model.modules() if isinstance(m, FSDPModule)]:
        for parameter in unit.fsdp_params if unit else []:
            gradients += [parameter.unsharded_accumulated_grad, parameter._unsharded_param.grad]
    for name in ("all_grad_tensors", "accumulated_grads_in_cpu"):  # ZeRO-2, and with offload
        for value in getattr(optimizer, name, {}).values():
            gradients += value if isinstance(value, list) else [value]
    return [*gradients, getattr(optimizer, "grad_partitions_flat_buffer", None)]  # ZeRO-3


def states_of(optimizer) -> list:
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors = [t for state in inner.state.values() for t in state.values()]
    tensors += [p for group in inner.param_groups for p in group["params"]]
    return [*tensors, *getattr(optimizer, "fp32_partitioned_groups_flat", [])]


def storages(tensors: list) -> dict[int, int]:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, torch.Tensor)]
    return {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local) if s.nbytes()}


class Measure(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step != 1:
            return
        trainer = self.trainer
        optimizer = trainer.deepspeed.optimizer if args.deepspeed else trainer.optimizer.optimizer
        held = {
            "parameters": storages(parameters_of(trainer.model)),
            "gradients": storages(gradients_of(trainer.model, optimizer)),
            "optimizer state": storages(states_of(optimizer)),
        }
        for storage in held["parameters"]:
            held["optimizer state"].pop(storage, None)  # fp32 weights are their own masters
        sums = {name: sum(found.values()) for name, found in held.items()}
        with open(f"memory-{os.environ['JOB_ID']}-{os.environ.get('RANK', 0)}.json", "w") as file:
            json.dump(sums, file)


def measuring(base: type) -> type:
    class Measuring(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(Measure(self))

    return Measuring


train.WorkshopTrainer = measuring(train.WorkshopTrainer)
train.run_and_exit(train.main)
