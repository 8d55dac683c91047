"""Estimate, before any GPU is used, the memory of a training per GPU and in the memory of a node.

    python scripts/estimate_memory.py --gpus 2 --gpu_memory 32
    python scripts/estimate_memory.py --model_name bigscience/bloom-3b --deepspeed ds_configs/zero3.json --gpus 4
    python scripts/estimate_memory.py --model_name bigscience/bloom-7b1 --gpus 8 --nodes 2 --gpu_memory 32 \\
        --fsdp --fsdp_config fsdp_configs/hybrid_shard.json

Which config to take, of all that there are:
    python scripts/estimate_memory.py --compare --model_name bigscience/bloom-3b --gpus 4 --gpu_memory 32

It takes the flags and variables of train.py, so a command of yours works here with the name of the script replaced.
BLOOM and custom-gpt need no download, other models their config.json. docs/memory.md explains the rows.
"""

import math
import os
from collections.abc import Mapping

import torch

from distributed.ds_config import offloaded
from estimate.command_line import RATES, check_optimizer, options_of_plan, read_config_files
from estimate.memory import GIB, estimate, totals, without_gpu
from estimate.model_shape import shape_for
from estimate_time import Rates, given_rates, offloads, predict_step
from settings.command_line import Options, precision_name
from shared.errors import WorkshopError, run_program
from shared.paths import REPOSITORY

CUDA_RESERVE = 2 * GIB  # per process, for the memory that CUDA and NCCL take of a node; not measured
FITS = 0.9  # of a GPU or node: the rest is for what is not counted
MEMORY_FLAGS = {
    "compare": {"action": "store_true", "help": "List all config files, those that fit first."},
    "knobs": {"action": "store_true", "help": "First all knobs, by where they come from, as a training prints them."},
    "gpu_memory": {"type": float, "default": None, "help": "GiB of one GPU, for the verdict. Default: the one here."},
    "cpu_memory": {"type": float, "default": None, "help": "GiB of one node, as in --mem of sbatch, for the verdict."},
}
VERDICTS = ("fits", "is tight", "does not fit")


def verdict(what: str, needed: float, there: float | None) -> str:
    if not there:
        return f"{what}: {needed / GIB:.1f} GiB needed"
    return f"{what}: {needed / GIB:.1f} GiB needed, {there:g} GiB there: {VERDICTS[tightness(needed, there)]}"


def tightness(needed: float, there: float) -> int:
    """0 to 2: an index of VERDICTS. needed: bytes. there: GiB."""
    if needed < FITS * there * GIB:
        return 0
    return 1 if needed < there * GIB else 2


def mem_option(on_node: float, ranks_per_node: int) -> str:
    """The value for sbatch --mem, with a fifth to spare and what CUDA takes in each process."""
    return f"{math.ceil((1.2 * on_node + ranks_per_node * CUDA_RESERVE) / GIB)}G"


def deepspeed_says(parameters: int, largest: int, zero: dict, gpus_per_node: int, nodes: int) -> str:
    """What DeepSpeed's own estimator gives for the model's state alone; it knows stages 2 and 3."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    cpu_offload = offloaded(zero, "optimizer")
    size = (gpus_per_node, nodes)
    if zero.get("stage") == 2:
        cpu, gpu = estimate_zero2_model_states_mem_needs(parameters, *size, cpu_offload)
    elif zero.get("stage") == 3:
        arguments = (*size, cpu_offload, offloaded(zero, "param"))
        cpu, gpu, _ = estimate_zero3_model_states_mem_needs(parameters, largest, *arguments)
    else:
        return ""
    return f"DeepSpeed's own estimator, model state only: {gpu / GIB:.2f} GiB per GPU, {cpu / GIB:.2f} GiB per node"


def read_options(
    argv: list[str] | None = None, description: str = "", environment: Mapping[str, str] = os.environ
) -> Options:
    """As `options_of_plan`, with the flags of this script. Raises WorkshopError (exit code 2)."""
    options = options_of_plan(argv, description, environment, MEMORY_FLAGS)
    check_optimizer(options)
    for flag in RATES:
        if options.values[flag] is not None and not options.values["compare"]:
            raise options.error(flag, "says nothing about memory", "give --compare, too, or take estimate_time.py")
    return options


def memory_table(options: Options) -> str:
    values = options.values
    held = estimate(options)
    if values["use_cpu"]:
        held = without_gpu(held)
    shape = shape_for(options)
    gpus = values["gpus"]
    nodes = values["nodes"]
    ranks = f"{gpus} rank(s) without a GPU" if values["use_cpu"] else f"{gpus} GPU(s)"
    batch = f"{values['per_device_train_batch_size']} x {values['max_length']} tokens"
    lines = [
        f"{values['model_name']}: {shape.model:,} parameters, {precision_name(values)}, micro batch {batch}, "
        f"{ranks} on {nodes} node(s)",
        f"{'GiB per rank':24}{'GPU':>8}{'CPU':>8}",
        *(f"{part.what:24}{part.gpu / GIB:8.2f}{part.cpu / GIB:8.2f}  {part.note}" for part in held),
    ]
    on_gpu, on_cpu = totals(held, gpus // nodes)
    if values["use_cpu"]:
        return "\n".join([*lines, verdict("one node", on_cpu, values["cpu_memory"])])
    lines += [verdict("one GPU", on_gpu, memory_of_gpu(options))]
    lines += [verdict("one node", on_cpu, values["cpu_memory"])]
    reserve = f"a fifth more, and {CUDA_RESERVE / GIB:g} GiB for CUDA in each process"
    asked = mem_option(on_cpu, gpus // nodes)
    if values["cpu_memory"] and float(asked.rstrip("G")) > values["cpu_memory"]:
        reserve += "; more than there is: take all of it"
    lines += [f"for sbatch: --mem={asked} ({reserve})"]
    if options.deepspeed_config:
        zero = options.deepspeed_config["zero_optimization"]
        lines += [deepspeed_says(shape.parameters, max(shape.sizes), zero, gpus // nodes, nodes)]
    lines += ["Not counted: CUDA context, NCCL, fragmentation."]
    return "\n".join(filter(None, lines))


def memory_of_gpu(options: Options) -> float | None:
    """GiB: given, else of the one that is here."""
    here = torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None
    return options.values["gpu_memory"] or here


# Which config to take


WIDTH = 54  # of the column with the files' names


def comparison(options: Options) -> str:
    """Plain training (or DDP) and all files of the two folders, what fits first, and of that the fastest."""
    values = options.values
    for flag in ("deepspeed", "fsdp"):
        if values[flag]:
            raise options.error(flag, "is what --compare chooses", "leave it out")
    if values["tensor_parallel"] > 1:
        raise options.error("tensor_parallel", "is not compared", "leave it out, or leave out --compare")
    shape_for(options)  # raises for a model of which nothing can be said
    rates = given_rates(options)
    choices = []
    refused = []
    for name, flags in configs(values["gpus"]).items():
        chosen = Options(values | flags, options.names)
        try:
            read_config_files(chosen)
        except WorkshopError as error:
            refused.append(f"{name:{WIDTH}}{error.what}; {error.way_out}")
        else:
            choices.append(choice(name, chosen, rates))
    gpus = f"{values['gpus']} GPU(s) on {values['nodes']} node(s)"
    batch = f"micro batch {values['per_device_train_batch_size']} x {values['max_length']} tokens"
    lines = [
        f"{values['model_name']}, {precision_name(values)}, {batch}, {gpus}",
        f"{'config':{WIDTH}}{'GiB/GPU':>8}{'GiB/node':>10}  {'verdict':14}{'s/step':>8}",
        *(line for _, line in sorted(choices)),
    ]
    if refused:
        lines += ["cannot be combined with these options:", *refused]
    hints = {
        "for a verdict: --gpu_memory, in GiB, and --cpu_memory": not memory_of_gpu(options),
        "the memory of a node is not judged: give --cpu_memory, in GiB": memory_of_gpu(options)
        and not values["cpu_memory"],
        "for seconds of a step: --matmul_tflops, --memory_bandwidth and, for several GPUs, --bus_bandwidth": not rates,
        "seconds without communication: give --bus_bandwidth": rates and values["gpus"] > 1 and rates.bus == math.inf,
        "no seconds for offload: how fast the CPU and its memory are is not known": rates,
    }
    return "\n".join([*lines, *(hint for hint, applies in hints.items() if applies)])


def configs(gpus: int) -> dict[str, dict]:
    """The flags of each file, by its name; DDP, or plain training on one GPU, has none."""
    found: dict[str, dict] = {"DDP" if gpus > 1 else "plain": {}}
    for path in sorted((REPOSITORY / "ds_configs").glob("*.json")):
        found[f"ds_configs/{path.name}"] = {"deepspeed": str(path)}
    for path in sorted((REPOSITORY / "fsdp_configs").glob("*.json")):
        found[f"fsdp_configs/{path.name}"] = {"fsdp": "True", "fsdp_config": str(path)}
    return found


def choice(name: str, options: Options, rates: Rates | None) -> tuple[tuple, str]:
    """What a config is sorted by, and its line."""
    on_gpu, on_node = totals(estimate(options), options.values["gpus"] // options.values["nodes"])
    memories = ((on_gpu, memory_of_gpu(options)), (on_node, options.values["cpu_memory"]))
    tight = max([tightness(needed, there) for needed, there in memories if there], default=None)
    seconds = predict_step(options, rates).seconds if rates and not offloads(options) else math.inf
    said = "" if tight is None else VERDICTS[tight]
    shown = "" if seconds == math.inf else f"{seconds:.3f}"
    line = f"{name:{WIDTH}}{on_gpu / GIB:8.1f}{on_node / GIB:10.1f}  {said:14}{shown:>8}"
    return (tight or 0, seconds, on_gpu), line.rstrip()


def main() -> None:
    options = read_options(description=__doc__)
    if options.values["knobs"]:
        print("\n".join(options.knob_lines()))
    print(comparison(options) if options.values["compare"] else memory_table(options))


if __name__ == "__main__":
    run_program(main)
