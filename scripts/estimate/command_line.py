"""Command line of the estimates: the flags of train.py, and flags for the number of GPUs and nodes."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace

import torch

from distributed.config_file import read_config_file
from estimate.flags import EstimateArguments, RankFlags
from settings.command_line import parse_command_line
from settings.optimizers import BY_FLAG, choose_optimizer
from settings.settings import Settings
from shared.errors import WorkshopError


def parse_plan(
    argv: list[str] | None = None,
    description: str = "",
    environment: Mapping[str, str] = os.environ,
    flags: type[RankFlags] = RankFlags,
) -> Settings:
    """Read the settings of a training run on the GPUs of --gpus and --nodes, with the content of its config files.

    The training runs on the CPU if the site has no GPUs (REQUIRE_GPU=0), this machine has none either, and
    --gpu_memory is not given.

    environment: the variables of the knobs. flags: the dataclass of the script's own flags.
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
    return read_config_file(settings, gpus, gpus // nodes)


def parse_memory_plan(
    argv: list[str] | None = None, description: str = "", environment: Mapping[str, str] = os.environ
) -> Settings:
    """Read the settings as `parse_plan` does, with the flags of estimate_memory.py.

    Raises WorkshopError (exit code 2).
    """
    settings = parse_plan(argv, description, environment, EstimateArguments)
    check_optimizer(settings)
    return settings


def check_optimizer(settings: Settings) -> None:
    """Raise WorkshopError (exit code 2) for an optimizer whose memory cannot be estimated."""
    if not choose_optimizer(settings).state:
        known = ", ".join(name for name, each in BY_FLAG.items() if each.state)
        what = f"{settings.trainer.optim} cannot be estimated, only {known} without --optim_args"
        raise WorkshopError("--optim", what, "estimate with one of these")
