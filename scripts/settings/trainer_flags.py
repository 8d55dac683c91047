"""Build transformers.TrainingArguments from the settings."""

import os
from dataclasses import fields
from typing import Any

import torch
from transformers import TrainingArguments

from settings.settings import Settings
from shared.errors import ENVIRONMENT, WorkshopError
from shared.tracker_setup import check_trackers

SHARDING = {"deepspeed", "fsdp", "fsdp_config", "parallelism_config"}


def training_arguments(settings: Settings, **others: Any) -> TrainingArguments:
    """Create the arguments, which opens the process group. others: values that turn on ZeRO or FSDP, and a time-out.

    Raise WorkshopError if a value is wrong (exit code 2), or if the ranks cannot connect (3).
    """
    try:
        return TrainingArguments(**trainer_flags(settings) | others)
    except (ValueError, OSError, ImportError) as error:
        raise WorkshopError("command line", str(error), "see --help") from error
    except torch.distributed.DistError as error:
        remedy = "check MASTER_ADDR and MASTER_PORT on every node"
        raise WorkshopError("process group", str(error), remedy, ENVIRONMENT) from error


def trainer_flags(settings: Settings) -> dict[str, Any]:
    """Return all values for TrainingArguments except those that turn on ZeRO or FSDP."""
    known = {each.name for each in fields(TrainingArguments) if each.init}
    flags = {name: value for name, value in settings.flat().items() if name in known - SHARDING}
    flags["save_total_limit"] = max(0, flags["save_total_limit"])  # 0, and elsewhere also -1, is no limit
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
