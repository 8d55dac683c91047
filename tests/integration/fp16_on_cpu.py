"""Start train.py with fp16 on the CPU, only for tests: train.py and the libraries do not allow fp16 there.

fp16 is the default on GPUs. Its loss scaling has the same arithmetic here: autocast to fp16, a GradScaler, and
DeepSpeed's own loss scaling. Only the kernels differ.
"""

import os
import sys
from dataclasses import replace

sys.path.insert(0, "scripts")

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.fsdp_utils import get_fsdp2_grad_scaler
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

import train
from settings import command_line
from settings.settings import Settings


def fp16_everywhere(settings: Settings, gpu: bool) -> Settings:
    return replace(settings, trainer=replace(settings.trainer, fp16=True, bf16=False, use_cpu=True))


def init_with_scaler(self: Accelerator, *args, **kwargs) -> None:
    original_init(self, *args, **kwargs)
    if self.distributed_type != DistributedType.DEEPSPEED:  # DeepSpeed's engine scales the loss itself
        self.native_amp = True
        self.scaler = get_fsdp2_grad_scaler(device="cpu") if self.is_fsdp2 else torch.amp.GradScaler("cpu")


def unscale_with_overflow(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Print each rank's scale in each step, and give only rank 1 an infinite gradient in step OVERFLOW_STEP."""
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
