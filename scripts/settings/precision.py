"""Choose the precision of a training run: the one that the user gave, otherwise one that the hardware supports."""

import re
from dataclasses import replace
from pathlib import Path

import torch

from settings.settings import Precision, Settings

DTYPES: dict[Precision, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def resolve_precision(settings: Settings, gpu: bool) -> Settings:
    """Replace unset fp16 and bf16 by a precision that the hardware supports. Master weights are always fp32.

    gpu: True if the training will have a GPU. Raises WorkshopError (exit code 2) for an unsupported precision.
    """
    fp16 = settings.trainer.fp16
    bf16 = settings.trainer.bf16
    gpu = gpu and not settings.trainer.use_cpu
    if fp16 and bf16:
        raise settings.error("fp16", f"contradicts {settings.names.get('bf16', '--bf16')}", "give one of the two")
    if fp16 and not gpu:
        remedy = "use --bf16, or --fp16 False for fp32"
        raise settings.error("fp16", "fp16 needs a CUDA GPU, and this machine has none", remedy)
    note = ""
    if fp16 is None and not bf16:
        fp16 = gpu
        bf16 = bf16 is None and not gpu and cpu_has_bf16()
        note = "default" if gpu else "default without a GPU, where fp16 does not run"
    here = gpu and torch.cuda.is_available()
    if bf16 and here and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise settings.error("bf16", "this GPU has no bf16", "use --fp16")
    trainer = replace(settings.trainer, fp16=bool(fp16), bf16=bool(bf16), use_cpu=not gpu)
    return replace(settings, trainer=trainer, precision_note=note)


def cpu_has_bf16() -> bool:
    """Return True if the CPU has bf16 instructions (AVX512-BF16, AMX or Arm BF16), so that it need not emulate bf16."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return re.search(r"^(flags|Features)\s*:.*\b(avx512_bf16|amx_bf16|bf16)\b", flags, re.MULTILINE) is not None
