"""The command line of the estimates: that of train.py, for a training on as many ranks and nodes as one says."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace

import torch

from distributed.ds_config import check_ds_config
from distributed.fsdp_config import check_fsdp_file, resolve_sizes
from distributed.tensor_parallel import check_groups
from settings.command_line import parse_command_line
from settings.settings import EstimateArguments, RankFlags, Settings, StepFlags
from shared.errors import WorkshopError

RATES = ("matmul_tflops", "memory_bandwidth", "bus_bandwidth")
ADAMW = ("adamw_torch", "adamw_torch_fused")


def parse_plan(
    argv: list[str] | None = None,
    description: str = "",
    environment: Mapping[str, str] = os.environ,
    flags: type[RankFlags] = StepFlags,
) -> Settings:
    """Read the settings of a training on as many GPUs as --gpus and --nodes say, with the content of its config files.

    At a site without GPUs (REQUIRE_GPU=0), if this machine has none either, the training runs on the CPU, unless
    --gpu_memory asks for a GPU.

    environment: where the variables of the knobs are looked up. flags: the dataclass of the script's own flags.
    Raises WorkshopError (exit code 2).
    """
    words = sys.argv if argv is None else argv
    asks_for_gpu = any(word.replace("-", "_").startswith("__gpu_memory") for word in words)
    gpu = environment.get("REQUIRE_GPU") != "0" or asks_for_gpu or torch.cuda.is_available()
    settings = parse_command_line(description, argv, flags, gpu=gpu, environment=environment)
    if "gpus" not in settings.names:
        settings = replace(settings, estimate=replace(settings.estimate, gpus=settings.model.tensor_parallel))
    gpus = settings.estimate.gpus
    nodes = settings.estimate.nodes
    if gpus % nodes:
        raise WorkshopError(
            "--gpus", f"{gpus} is not a multiple of --nodes {nodes}", "give the GPUs of all nodes together"
        )
    return read_config_files(settings)


def parse_memory_plan(
    argv: list[str] | None = None, description: str = "", environment: Mapping[str, str] = os.environ
) -> Settings:
    """Do the same as `parse_plan` for estimate_memory.py, with its flags. Raises WorkshopError (exit code 2)."""
    settings = parse_plan(argv, description, environment, EstimateArguments)
    check_optimizer(settings)
    for flag in RATES:
        if getattr(settings.estimate, flag) is not None and not settings.estimate.compare:
            raise settings.error(flag, "says nothing about memory", "give --compare, too, or take estimate_time.py")
    return settings


def read_config_files(settings: Settings) -> Settings:
    """Add the content of --deepspeed or --fsdp_config to the settings. Raises WorkshopError (exit code 2)."""
    gpus = settings.estimate.gpus
    tensor_parallel = settings.model.tensor_parallel
    check_groups(settings, gpus)
    if settings.trainer.deepspeed:
        settings = replace(settings, deepspeed_config=check_ds_config(settings.trainer.deepspeed))
    if settings.trainer.fsdp:
        file = settings.trainer.fsdp_config
        config = check_fsdp_file(file, tensor_parallel) if file else {}
        groups = gpus // tensor_parallel
        resolve_sizes(file or "--fsdp", config, groups, groups // settings.estimate.nodes)
        settings = replace(settings, fsdp_config=config)
    return settings


def check_optimizer(settings: Settings) -> None:
    """Raises WorkshopError (exit code 2) for an optimizer whose state and step are not counted here."""
    if settings.trainer.optim not in ADAMW:
        what = f"the state of {settings.trainer.optim} is not known here"
        raise WorkshopError("--optim", what, f"estimate with {ADAMW[0]}")
