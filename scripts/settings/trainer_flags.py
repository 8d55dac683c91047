"""Build the flags for TrainingArguments. They are an untyped dict, because transformers checks them."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from transformers import TrainingArguments

from settings.settings import Settings
from shared.errors import ENVIRONMENT, WorkshopError
from shared.trackers import check_trackers

SHARDING = {"deepspeed", "fsdp", "fsdp_config", "parallelism_config"}


def trainer_flags(settings: Settings) -> dict[str, Any]:
    """Return all values for TrainingArguments except those that turn on ZeRO or FSDP, which train.py adds."""
    known = {each.name for each in fields(TrainingArguments) if each.init}
    flags = {name: value for name, value in settings.flat().items() if name in known - SHARDING}
    flags["output_dir"] = settings.trainer.output_dir or "output"
    flags["report_to"] = check_trackers(settings.trainer.report_to) or "none"
    flags["run_name"] = settings.trainer.run_name or os.path.basename(os.getcwd())
    # If tf32 is unset, --torch_compile turns TF32 on, and fp32 training would lose precision
    flags["tf32"] = bool(settings.trainer.tf32)
    # Offloaded gradients are on the CPU when their norm is summed over the ranks, and NCCL cannot send CPU tensors ("No
    # backend type associated with device type cpu"). So give the process group both backends
    if settings.fsdp_config and settings.fsdp_config.get("cpu_offload"):
        flags["ddp_backend"] = "cuda:nccl,cpu:gloo"
    return flags


@contextlib.contextmanager
def argument_errors() -> Iterator[None]:
    """Replace the errors of TrainingArguments by WorkshopError."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise WorkshopError("command line", str(error), "see --help") from error
    except torch.distributed.DistError as error:
        way_out = "check MASTER_ADDR and MASTER_PORT on every node"
        raise WorkshopError("process group", str(error), way_out, ENVIRONMENT) from error
