"""The GPU of this process in NVML, the library behind nvidia-smi.

NVML numbers all GPUs of the node, because it ignores CUDA_VISIBLE_DEVICES. So a GPU is found by its UUID.
"""

from typing import Any

import pynvml
import torch


def gpu_uuid() -> str:
    return f"GPU-{torch.cuda.get_device_properties().uuid}"


def find_gpu() -> Any:
    """Return NVML's handle of the current GPU. Raises pynvml.NVMLError if the driver does not know this GPU."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid())


def power_limit_w() -> float | None:
    """Return the power limit of the current GPU in watts. None if there is no GPU, or if it has no limit."""
    if not torch.cuda.is_available():
        return None
    try:
        return pynvml.nvmlDeviceGetEnforcedPowerLimit(find_gpu()) / 1000
    except pynvml.NVMLError:
        return None
