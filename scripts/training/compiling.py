"""torch.compile, for `--torch_compile`: the model's blocks as fused kernels, or eager where nothing can be compiled."""

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from parallel import watchdog
from parallel.distributed import gather_lists, rank
from training.callbacks import WARM_UP_STEPS


def compile_or_eager(training_args: Any) -> str:
    """Switch --torch_compile off on all ranks where one cannot compile (no C++ compiler, say). Collective.

    Returns the reason, else "". To be called before the Trainer is made: accelerate reads what is set here then.
    """
    if not training_args.torch_compile:
        return ""
    # one block is compiled for all of its kind: minutes less, and the hooks of FSDP and DeepSpeed stay outside
    os.environ.setdefault("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    backend = training_args.torch_compile_backend
    own_reason = ""
    watchdog.beat("trying torch.compile")
    trial = torch.compile(torch.sin, backend=backend, mode=training_args.torch_compile_mode)
    try:
        trial(torch.ones(2, device=training_args.device))
    except Exception as error:  # whatever PyTorch, Triton and the compilers end with
        said = str(error).strip().splitlines() or [type(error).__name__]
        own_reason = f"{backend} cannot compile on {socket.gethostname()} ({said[0]})"
    reasons = [reason for (reason,) in gather_lists([own_reason]) if reason]
    if not reasons:
        return ""
    training_args.torch_compile = False
    training_args.torch_compile_backend = "no"  # accelerate's name for eager
    return reasons[0]


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
