"""The command line of the estimates: that of train.py, for a training on as many ranks and nodes as one says."""

import os
import sys
from collections.abc import Mapping

import torch

from distributed.ds_config import check_ds_config
from distributed.fsdp_config import check_fsdp_file, resolve_sizes
from distributed.tensor_parallel import check_groups
from settings.command_line import Options, parse_command_line
from shared.errors import WorkshopError

HARDWARE_FLAGS = {
    "gpus": {"type": int, "default": 1, "help": "GPUs of the whole job, one rank each."},
    "nodes": {"type": int, "default": 1, "help": "Nodes, with equally many GPUs each."},
    "matmul_tflops": {
        "type": float,
        "default": None,
        "help": "10^12 operations per second of one GPU in matrix products: at most matmul_peak_tflops of a record.",
    },
    "memory_bandwidth": {"type": float, "default": None, "help": "GB/s of one GPU's memory, read and written."},
    "bus_bandwidth": {
        "type": float,
        "default": None,
        "help": "GB/s between the ranks: bus_bandwidth_gb_per_s of measure_bandwidth.py.",
    },
}
RATES = ("matmul_tflops", "memory_bandwidth", "bus_bandwidth")
ADAMW = ("adamw_torch", "adamw_torch_fused")


def options_of_plan(
    argv: list[str] | None,
    description: str,
    environment: Mapping[str, str] = os.environ,
    extra: dict | None = None,
) -> Options:
    """The options of a training with as many GPUs as --gpus and --nodes say, its config files read.

    At a site without GPUs (REQUIRE_GPU=0), where there is none either, they are those of its ranks on the CPU, unless
    --gpu_memory asks for a GPU.

    environment: where the variables of the knobs are looked up. extra: flags of one script alone.
    Raises WorkshopError (exit code 2).
    """
    flags = HARDWARE_FLAGS | (extra or {})
    words = sys.argv if argv is None else argv
    gpu = environment.get("REQUIRE_GPU") != "0" or "--gpu_memory" in words or torch.cuda.is_available()
    options = parse_command_line(description, argv, flags, gpu=gpu, environment=environment)
    values = options.values
    for flag, details in flags.items():
        if "type" in details and values[flag] is not None and not values[flag] > 0:
            raise WorkshopError(f"--{flag}", f"{values[flag]:g} is too small", "give a number above 0")
    if "gpus" not in options.names:
        values["gpus"] = values["tensor_parallel"]
    if values["gpus"] % values["nodes"]:
        what = f"{values['gpus']} GPUs do not spread over {values['nodes']} nodes"
        raise WorkshopError("--gpus", what, "give a multiple of the nodes")
    read_config_files(options)
    return options


def read_config_files(options: Options) -> None:
    """Put the content of --deepspeed or --fsdp_config into the options. Raises WorkshopError (exit code 2)."""
    values = options.values
    tensor_parallel = values["tensor_parallel"]
    check_groups(options, values["gpus"])
    if values["deepspeed"]:
        options.deepspeed_config = check_ds_config(values["deepspeed"])
    if values["fsdp"]:
        file = values["fsdp_config"]
        options.fsdp_config = check_fsdp_file(file, tensor_parallel) if file else {}
        groups = values["gpus"] // tensor_parallel
        resolve_sizes(file or "--fsdp", options.fsdp_config, groups, groups // values["nodes"])


def check_optimizer(options: Options) -> None:
    """Raises WorkshopError (exit code 2) for an optimizer whose state and step are not counted here."""
    if options.values["optim"] not in ADAMW:
        what = f"the state of {options.values['optim']} is not known here"
        raise WorkshopError("--optim", what, f"estimate with {ADAMW[0]}")
