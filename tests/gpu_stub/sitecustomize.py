"""A stub for a GPU in each Python process that has this folder on PYTHONPATH.

STUB_GPU=one: CUDA starts one GPU. STUB_GPU=old_driver: the driver lists one GPU, which CUDA cannot start.

The stub only answers queries about the GPU, through torch.cuda's own code; it cannot compute. Like the real CUDA,
it reads CUDA_VISIBLE_DEVICES only at its start. It prints STARTED if a GPU is visible at its start.
"""

import importlib.util
import os
import sys
from functools import cache

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020)."
STARTED = "the stub for CUDA was started"


class TorchCuda:
    """A module finder that patches torch.cuda right after its import."""

    def find_spec(self, name, path, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch_cuda(module)

        spec.loader.exec_module = exec_module
        return spec


def patch_cuda(cuda) -> None:
    import torch

    usable = os.environ["STUB_GPU"] == "one"

    @cache
    def start_cuda() -> int:
        """Number of GPUs that CUDA has started."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") in (None, "0")
        if visible:
            print(STARTED, file=sys.stderr, flush=True)
        return int(visible and usable)

    def fail(*arguments):
        raise RuntimeError(OLD_DRIVER if not usable else "the stub for a GPU cannot compute")

    cuda._is_compiled = lambda: True
    cuda._raw_device_count_nvml = lambda: 1  # torch.cuda still applies CUDA_VISIBLE_DEVICES to this count
    cuda._lazy_init = fail
    torch._C._cuda_getDeviceCount = start_cuda
    torch._C._cuda_setDevice = torch._C._cuda_getCurrentRawStream = fail


if os.environ.get("STUB_GPU"):
    sys.meta_path.insert(0, TorchCuda())
