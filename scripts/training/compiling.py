"""torch.compile, for `--torch_compile`: the model's blocks as fused kernels."""

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from errors import ENVIRONMENT, WorkshopError
from parallel import watchdog
from parallel.distributed import rank
from training.callbacks import WARM_UP_STEPS


def check_torch_compile(training_args: Any) -> None:
    """Compile one function, before anything is written. Raises WorkshopError (exit code 3) where that fails."""
    # one block is compiled for all of its kind: minutes less, and the hooks of FSDP and DeepSpeed stay outside
    os.environ.setdefault("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    watchdog.beat("trying torch.compile")
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


class CompiledCallback(TrainerCallback):
    """Tells job.sh, which may wait for it with the memory loggers, that what is to be compiled is compiled."""

    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        # the first shape, then one graph for all, once another shape has come
        if self.steps == WARM_UP_STEPS and rank() == 0 and "RUN_DIR" in os.environ:
            with contextlib.suppress(OSError):  # the logs begin later, then
                (Path(os.environ["RUN_DIR"]) / "compiled").touch()
