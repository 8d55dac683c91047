"""torch.compile, for `--torch_compile`: the model's blocks as fused kernels."""

import os
import socket
from typing import Any

import torch

from distributed import watchdog
from shared.errors import ENVIRONMENT, WorkshopError


def check_torch_compile(training_args: Any) -> None:
    """Compile one function, before anything is written. Raises WorkshopError (exit code 3) where that fails."""
    # one block is compiled for all of its kind: minutes less, and the hooks of FSDP and DeepSpeed stay outside
    os.environ.setdefault("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    watchdog.progress("trying torch.compile")
    backend = training_args.torch_compile_backend
    trial = torch.compile(torch.sin, backend=backend, mode=training_args.torch_compile_mode)
    try:
        trial(torch.ones(2, device=training_args.device))
    except Exception as error:  # whatever PyTorch, Triton and the compilers end with
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = f"{backend} cannot compile on {socket.gethostname()} ({reason})"
        raise WorkshopError("--torch_compile", what, "load a C++ compiler, or leave it out", ENVIRONMENT) from error


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether a part of a model that accelerate or DeepSpeed has wrapped is compiled, when it is first called."""
    return any(
        isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )
