"""The GPU of this process in NVML, the library that nvidia-smi uses.

NVML numbers all GPUs of the node, because it ignores CUDA_VISIBLE_DEVICES. So a GPU is found by its UUID.
"""

from typing import Any

import pynvml
import torch


def gpu_uuid(index: int | None) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def find_gpu(index: int | None = None) -> Any:
    """Return NVML's handle of a GPU. index: PyTorch's number of the GPU, by default the current one.

    Raises pynvml.NVMLError if the driver does not know this GPU, for example a MIG slice or a GPU of AMD.
    """
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid(index))


def power_limit_w() -> float | None:
    """Return the power limit of the current GPU in watts. None without a GPU or a limit."""
    if not torch.cuda.is_available():
        return None
    try:
        return pynvml.nvmlDeviceGetEnforcedPowerLimit(find_gpu()) / 1000
    except pynvml.NVMLError:
        return None
