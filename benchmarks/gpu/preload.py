"""Import what the training runs import, without CUDA, which does not survive a fork. The fork server imports this file.

run.py starts each item as a process that this server forks. An item then starts in a second, not in ten or more.
"""

import contextlib
import ctypes
import gc
import importlib
import os

# PyTorch then counts GPUs by NVML. Otherwise it would initialise CUDA here
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it when it is imported
importlib.import_module("shared.before_imports").prepare_imports()
importlib.import_module("distributed.process_group").prepare_deepspeed()
for name in ("deepspeed", "train", "transformers.models.bloom.modeling_bloom", "torch.profiler", "gpu_check"):
    importlib.import_module(name)
with contextlib.suppress(OSError):  # without a driver there is no such library
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    while nvml.nvmlShutdown() == 0:  # close each connection to the driver, so that each child opens its own
        pass
gc.collect()
gc.freeze()  # otherwise garbage collection in a child touches, and so copies, the memory of all imports
