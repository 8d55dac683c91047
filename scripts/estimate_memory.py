"""Estimate, before any GPU is used, the memory of a training per GPU and in the memory of a node.

    python scripts/estimate_memory.py --gpus 2 --gpu_memory 32
    python scripts/estimate_memory.py --model_name bigscience/bloom-3b --deepspeed ds_configs/zero3.json --gpus 4
    python scripts/estimate_memory.py --model_name bigscience/bloom-7b1 --gpus 8 --nodes 2 --gpu_memory 32 \\
        --fsdp --fsdp_config fsdp_configs/hybrid_shard.json

It takes the flags and variables of train.py, so a command of yours works here with the name of the script replaced.
BLOOM and custom-gpt need no download, other models their config.json. docs/memory.md explains the rows.
"""

import itertools
import math
import os
from dataclasses import dataclass
from types import SimpleNamespace

import psutil
import torch
from config import Options, parse_command_line, precision_name
from ds_config import check_ds_config
from errors import fail
from fsdp_config import check_fsdp_file, fsdp_name, resolve_sizes, shard_count, wrap_classes
from model_shape import Shape, shape_for

GIB = 2**30
EXTRA_FLAGS = {
    "gpus": {"type": int, "default": 1, "help": "GPUs of the whole job, one rank each."},
    "nodes": {"type": int, "default": 1, "help": "Nodes, with equally many GPUs each."},
    "gpu_memory": {"type": float, "default": None, "help": "GiB of one GPU, for the verdict. Default: the one here."},
    "cpu_memory": {"type": float, "default": None, "help": "GiB of one node, as in --mem of sbatch, for the verdict."},
}
MASTERS_AND_MOMENTS = 12  # bytes per parameter: fp32 weight, first and second moment of Adam (arXiv:1910.02054, 3.1)
FP32 = 4
CUDA_RESERVE = 2 * GIB  # per process, for the memory that CUDA and NCCL take of a node; not measured
ADAMW = ("adamw_torch", "adamw_torch_fused")


@dataclass(frozen=True)
class Held:
    """What one rank holds, in bytes of its GPU and of its node's memory.

    while_loading: not together with the rest. by_one_rank: of the job; the others hold none of it.
    """

    what: str
    gpu: float
    cpu: float = 0
    note: str = ""
    while_loading: bool = False
    by_one_rank: bool = False


def estimate(options: Options) -> list[Held]:
    """Parameters, gradients, optimizer state, buffers, activations and logits of the rank that holds most."""
    shape, world = shape_for(options), options.values["gpus"]
    low = FP32 if precision_name(options.values) == "fp32" else 2
    if options.deepspeed_config:
        held = deepspeed(shape, options.deepspeed_config["zero_optimization"], world, low)
    elif options.fsdp_config is not None:
        held = fsdp(shape, options, low)
    else:
        held = plain(shape, world)
    activations, note = shape.activations, "kept for the backward pass"
    if options.values["gradient_checkpointing"] or (options.fsdp_config or {}).get("activation_checkpointing"):
        activations = shape.layers * shape.block_input + shape.activations / shape.layers
        note = "checkpointed: inputs of the blocks, and one block's"
    elif not options.deepspeed_config and options.fsdp_config is None and low == 2:
        note += ", with autocast's 16-bit copies of the weights"
    return [
        *held,
        Held("activations", activations, note=note),
        Held("logits", shape.logits, note="and their gradient"),
        Held("Python, libraries", 0, psutil.Process().memory_info().rss, "as this very process has it"),
    ]


def plain(shape: Shape, world: int) -> list[Held]:
    """Trainer and DDP: fp32 weights, gradients and moments, whole on every rank."""
    total = shape.parameters
    buckets = FP32 * total if world > 1 else 0
    return [
        Held("parameters", FP32 * total, note="fp32 masters"),
        Held("gradients", FP32 * total, note="fp32"),
        Held("optimizer state", 2 * FP32 * total, note="two moments of Adam, fp32"),
        Held("buffers", buckets, note="DDP's gradient buckets" if buckets else "one rank has nobody to talk to"),
        loading(total),
    ]


def deepspeed(shape: Shape, zero: dict, world: int, low: int) -> list[Held]:
    """ZeRO 0 to 3 (arXiv:1910.02054); low: bytes of a parameter as DeepSpeed computes with it."""
    stage, total, share = zero.get("stage", 0), shape.parameters, shape.parameters / world
    optimizer_on_cpu, parameters_on_cpu = offloaded(zero, "optimizer"), offloaded(zero, "param")
    states = Held("optimizer state", *place(MASTERS_AND_MOMENTS * share, optimizer_on_cpu), "fp32 masters, two moments")
    bucket = low * min(auto(zero, "reduce_bucket_size", shape.hidden**2, 5e8), total)
    step = FP32 * share  # the optimizer steps on fp32 gradients
    if stage == 0:
        kept = 2 * FP32 if low == FP32 else MASTERS_AND_MOMENTS  # fp32 weights are their own masters
        states = Held("optimizer state", kept * total, note="two moments" if low == FP32 else states.note)
        gradients = Held("gradients", low * total, note="whole")
        buffers = Held("buffers", 0 if low == FP32 else FP32 * total, note="fp32 gradients in the step")
    elif stage == 1:
        gradients = Held("gradients", low * total, note="whole until the last backward pass of a step")
    elif stage == 2:
        most = max(stage2_gradients(shape.sizes, world))
        gradients = Held("gradients", *place(low * most, optimizer_on_cpu), "the share, tensors on its edge whole")
    else:
        gradients = Held("gradients", *place(low * share, optimizer_on_cpu), "the share")
    if stage in (1, 2):
        largest = low * max(shape.sizes)
        if optimizer_on_cpu:
            cpu = step + largest + low * share
            buffers = Held("buffers", bucket + largest, cpu, "bucket, transfers, fp32 gradients")
        else:
            buffers = Held("buffers", bucket + step, note="bucket; fp32 gradients in the step")
    parameters = Held("parameters", low * total, note="whole")
    if stage == 3:
        parameters = Held("parameters", *place(low * share, parameters_on_cpu), "the share")
        live = min(total, zero.get("stage3_max_live_parameters", 1e9)) if world > 1 or parameters_on_cpu else 0
        prefetch = auto(zero, "stage3_prefetch_bucket_size", 0.9 * shape.hidden**2, 5e7) if live else 0
        gpu = bucket + low * (live + prefetch) + (0 if optimizer_on_cpu else step)
        note = "bucket, parameters gathered at a time, fp32 gradients in the step"
        buffers = Held("buffers", gpu, step if optimizer_on_cpu else 0, note)
    held = [parameters, gradients, states, buffers, loading(total, by_one_rank=stage == 3)]
    if optimizer_on_cpu or parameters_on_cpu:
        pinned = pinned_by_deepspeed(shape, zero, world, low)
        held.append(rounding(pinned, kept_from_loading(shape, zero, world, low)))
    return held


def pinned_by_deepspeed(shape: Shape, zero: dict, world: int, low: int) -> list[float]:
    """Sizes of the buffers that DeepSpeed pins with offload_optimizer, offload_param or both, in bytes."""
    share, sizes = shape.parameters / world, []
    if offloaded(zero, "param"):
        sizes.append(low * share)  # whatever pin_memory says
    if not offloaded(zero, "optimizer") or not zero["offload_optimizer"].get("pin_memory", True):
        return sizes
    if zero.get("stage") == 3:
        group = zero.get("sub_group_size", 1e9)  # the fp32 gradients are cut into groups of so many
        whole_groups, rest = divmod(share, group)
        return [*sizes, low * share, *[FP32 * group] * int(whole_groups), FP32 * rest]
    sizes += [FP32 * share, FP32 * share, low * share, low * max(shape.sizes)]  # masters, gradients, transfers
    if zero.get("stage") == 2:
        sizes += [low * size for size in rank_gradients(shape.sizes, world)]
    return sizes


def kept_from_loading(shape: Shape, zero: dict, world: int, low: int) -> float:
    """Bytes of pinned blocks that ZeRO-3 gave back after loading, and PyTorch keeps for a use that never comes."""
    if not offloaded(zero, "param") or not zero["offload_param"].get("pin_memory", True):
        return 0
    return sum(power_of_two(low * size / world) for size in shape.sizes)


def rounding(pinned: list[float], kept: float = 0) -> Held:
    """What pinned memory takes beyond its content: PyTorch rounds each block up to a power of two (host allocator)."""
    extra = sum(power_of_two(size) - size for size in pinned)
    return Held("pinned, unused", 0, extra + kept, "pinned blocks are rounded up to powers of two")


def power_of_two(size: float) -> int:
    return 1 << (math.ceil(size) - 1).bit_length()


def rank_gradients(sizes: tuple[int, ...], world: int) -> list[int]:
    """Elements of each gradient that the first rank keeps under ZeRO-2."""
    share, ends = math.ceil(sum(sizes) / world), itertools.accumulate(sizes)
    return [size for size, end in zip(sizes, ends, strict=True) if end - size < share]


def stage2_gradients(sizes: tuple[int, ...], world: int) -> list[int]:
    """Gradient elements that each rank keeps: DeepSpeed cuts the row of all parameters into equal parts, and a
    gradient on the edge of two parts stays whole on both sides."""
    share = math.ceil(sum(sizes) / world)
    ends = list(itertools.accumulate(sizes))
    parts = [(rank * share, (rank + 1) * share) for rank in range(world)]
    return [
        sum(size for size, end in zip(sizes, ends, strict=True) if end > first and end - size < last)
        for first, last in parts
    ]


def fsdp(shape: Shape, options: Options, low: int) -> list[Held]:
    """FSDP1 and FSDP2 (arXiv:2304.11277): fp32 shares; units gathered in the precision of the computation."""
    config, total = options.fsdp_config, shape.parameters
    share, on_cpu = total / shard_count(config), config.get("cpu_offload", False)
    accumulates = options.values["gradient_accumulation_steps"] > 1
    if accumulates:
        gradients = Held("gradients", low * total, note="whole while gradients accumulate")
    else:
        gradients = Held("gradients", *place(FP32 * share, on_cpu), "fp32 share")
    rest, block = total - sum(shape.block_sizes), max(shape.block_sizes, default=0)
    whole = not wrap_classes(config, SimpleNamespace(_no_split_modules=["blocks"])) or not shape.block_sizes
    if whole or "SHARD_GRAD_OP" in fsdp_name(config):
        gathered, note = total, "all parameters gathered"
    else:
        gathered, note = rest + 2 * block, "two blocks gathered, embedding and head throughout"
    reduced = FP32 * (total if whole else max(rest, block))  # what one unit puts into its reduce-scatter
    gathered = gathered if shard_count(config) > 1 or on_cpu else 0
    held = [
        Held("parameters", *place(FP32 * share, on_cpu), "fp32 share"),
        gradients,
        Held("optimizer state", *place(2 * FP32 * share, on_cpu), "two moments of Adam, fp32 share"),
        Held("buffers", low * gathered + reduced, FP32 * share if on_cpu and accumulates else 0, note),
        loading(total),
    ]
    if on_cpu:  # each parameter's share and its gradient are pinned on their own
        held.append(rounding([FP32 * size / shard_count(config) for size in shape.sizes] * 2))
    return held


def loading(total: int, by_one_rank: bool = False) -> Held:
    note = "by rank 0 alone, as it hands out the shares" if by_one_rank else "before they move to the GPU"
    return Held("weights while loading", 0, FP32 * total, note, while_loading=True, by_one_rank=by_one_rank)


def place(size: float, on_cpu: bool) -> tuple[float, float]:
    return (0, size) if on_cpu else (size, 0)


def offloaded(zero: dict, part: str) -> bool:
    return (zero.get(f"offload_{part}") or {}).get("device", "none") != "none"


def auto(section: dict, key: str, by_model: float, default: float) -> float:
    """The Trainer sizes an "auto" by the model; a key that is not there has DeepSpeed's default."""
    value = section.get(key, default)
    return by_model if value == "auto" else value


def totals(held: list[Held], ranks_per_node: int) -> tuple[float, float]:
    """Bytes of the fullest GPU, and of the first node's memory: loading comes before the rest."""
    process = sum(part.cpu for part in held if part.what == "Python, libraries")
    training = ranks_per_node * sum(part.cpu for part in held if not part.while_loading)
    loading = ranks_per_node * process
    for part in held:
        if part.while_loading:
            loading += part.cpu * (1 if part.by_one_rank else ranks_per_node)
        elif part.what == "parameters":  # offloaded ones are there as soon as they are loaded
            loading += part.cpu * ranks_per_node
    return sum(part.gpu for part in held), max(training, loading)


def mem_option(on_node: float, ranks_per_node: int) -> str:
    """The value for sbatch --mem, with a fifth to spare and what CUDA takes in each process."""
    return f"{math.ceil((1.2 * on_node + ranks_per_node * CUDA_RESERVE) / GIB)}G"


def verdict(what: str, needed: float, there: float | None) -> str:
    if not there:
        return f"{what}: {needed / GIB:.1f} GiB needed"
    fits = "fits" if needed < 0.9 * there * GIB else "is tight" if needed < there * GIB else "does not fit"
    return f"{what}: {needed / GIB:.1f} GiB needed, {there:g} GiB there: {fits}"


def deepspeed_says(parameters: int, largest: int, zero: dict, gpus_per_node: int, nodes: int) -> str:
    """What DeepSpeed's own estimator gives for the model's state alone; it knows stages 2 and 3."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    cpu_offload, size = offloaded(zero, "optimizer"), (gpus_per_node, nodes)
    if zero.get("stage") == 2:
        cpu, gpu = estimate_zero2_model_states_mem_needs(parameters, *size, cpu_offload)
    elif zero.get("stage") == 3:
        arguments = (*size, cpu_offload, offloaded(zero, "param"))
        cpu, gpu, _ = estimate_zero3_model_states_mem_needs(parameters, largest, *arguments)
    else:
        return ""
    return f"DeepSpeed's own estimator, model state only: {gpu / GIB:.2f} GiB per GPU, {cpu / GIB:.2f} GiB per node"


def complete(options: Options) -> Options:
    """Read the config files, for the number of ranks that the training will have."""
    values = options.values
    for flag in ("gpus", "nodes"):
        if values[flag] < 1:
            fail(f"--{flag}", f"{values[flag]} is too small", "give a whole number of at least 1")
    for flag in ("gpu_memory", "cpu_memory"):
        if values[flag] is not None and not values[flag] > 0:
            fail(f"--{flag}", f"{values[flag]:g} is too small", "give GiB, for example 32")
    if values["gpus"] % values["nodes"]:
        fail(
            "--gpus",
            f"{values['gpus']} GPUs do not spread over {values['nodes']} nodes",
            "give a multiple of the nodes",
        )
    if values["optim"] not in ADAMW:
        fail("--optim", f"the state of {values['optim']} is not known here", f"estimate with {ADAMW[0]}")
    os.environ |= {"WORLD_SIZE": str(values["gpus"]), "LOCAL_WORLD_SIZE": str(values["gpus"] // values["nodes"])}
    if values["deepspeed"]:
        options.deepspeed_config = check_ds_config(values["deepspeed"])
    if values["fsdp"]:
        options.fsdp_config = check_fsdp_file(values["fsdp_config"]) if values["fsdp_config"] else {}
        resolve_sizes(values["fsdp_config"] or "--fsdp", options.fsdp_config)
    return options


def report(options: Options) -> str:
    values, held, shape = options.values, estimate(options), shape_for(options)
    gpus, nodes = values["gpus"], values["nodes"]
    batch = f"{values['per_device_train_batch_size']} x {values['max_length']} tokens"
    lines = [
        f"{values['model_name']}: {shape.parameters:,} parameters, {precision_name(values)}, micro batch {batch}, "
        f"{gpus} GPU(s) on {nodes} node(s)",
        f"{'GiB per rank':24}{'GPU':>8}{'CPU':>8}",
        *(f"{part.what:24}{part.gpu / GIB:8.2f}{part.cpu / GIB:8.2f}  {part.note}" for part in held),
    ]
    on_gpu, on_cpu = totals(held, gpus // nodes)
    here = torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None
    lines += [verdict("one GPU", on_gpu, values["gpu_memory"] or here)]
    lines += [verdict("one node", on_cpu, values["cpu_memory"])]
    reserve = f"a fifth more, and {CUDA_RESERVE / GIB:g} GiB for CUDA in each process"
    lines += [f"for sbatch: --mem={mem_option(on_cpu, gpus // nodes)} ({reserve})"]
    if options.deepspeed_config:
        zero = options.deepspeed_config["zero_optimization"]
        lines += [deepspeed_says(shape.parameters, max(shape.sizes), zero, gpus // nodes, nodes)]
    lines += ["Not counted: CUDA context, NCCL, fragmentation."]
    return "\n".join(filter(None, lines))


def main() -> None:
    print(report(complete(parse_command_line(__doc__, extra=EXTRA_FLAGS, gpu=True))))


if __name__ == "__main__":
    main()
