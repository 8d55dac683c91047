"""Starts train.py with fp16 on the CPU, where it is refused and no library does it by itself. For the tests alone.

fp16 is the default on GPUs, and the arithmetic of its loss scaling is the same here: autocast to fp16, a GradScaler,
DeepSpeed's own loss scaling. What differs are the kernels.
"""

import os
import sys

sys.path.insert(0, "scripts")

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.fsdp_utils import get_fsdp2_grad_scaler
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

import train
from settings import command_line


def fp16_everywhere(options: command_line.Options, gpu: bool) -> None:
    options.values |= {"fp16": True, "bf16": False, "use_cpu": True}


def init_with_scaler(self: Accelerator, *args, **kwargs) -> None:
    original_init(self, *args, **kwargs)
    if self.distributed_type != DistributedType.DEEPSPEED:  # whose engine scales by itself
        self.native_amp = True
        self.scaler = get_fsdp2_grad_scaler(device="cpu") if self.is_fsdp2 else torch.amp.GradScaler("cpu")


def unscale_with_overflow(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """In the step OVERFLOW_STEP rank 1 alone has an infinite gradient. Each rank tells its scale in each step."""
    steps.append(self.get_scale())
    rank = os.environ["RANK"]
    print(f"rank {rank} scale {steps[-1]:.0f} \n", end="", flush=True)
    if rank == "1" and len(steps) == int(os.environ["OVERFLOW_STEP"]):
        optimizer.param_groups[0]["params"][0].grad.to_local()[0] = torch.inf
    original_unscale(self, optimizer)


steps: list[float] = []
original_unscale = torch.amp.GradScaler.unscale_
if "OVERFLOW_STEP" in os.environ:
    torch.amp.GradScaler.unscale_ = unscale_with_overflow
original_init = Accelerator.__init__
Accelerator.__init__ = init_with_scaler
CPU_Accelerator.is_fp16_supported = lambda self: True
command_line.resolve_precision = fp16_everywhere

train.run_and_exit(train.main)
