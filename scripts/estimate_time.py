"""Estimate the time of an optimizer step: computing, optimizer, communication, for every strategy and number of ranks.

    python scripts/estimate_time.py --model_name tiny-bloom --max_length 128
    python scripts/estimate_time.py --model_name bigscience/bloom-3b --deepspeed ds_configs/zero3.json --gpus 4 \\
        --matmul_tflops 100 --memory_bandwidth 800 --bus_bandwidth 50

It takes the flags and variables of train.py. How fast the hardware is, is measured here, or given for hardware that is
elsewhere: numbers of one rank while all of them work. docs/memory.md explains the rows, and how far off they are.

Computing is a roofline (doi:10.1145/1498765.1498785): each operation of one micro batch takes as long as its arithmetic
at the speed of matrix products, or as long as its tensors at the speed of the memory, whichever is more. The rest is
bytes over bandwidth: of the weights, gradients and moments that the optimizer passes over, and of what a rank sends.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from config import Options, compute_dtype, precision_name
from errors import run_program
from estimate.model_shape import (
    FP32,
    HALF,
    Shape,
    casts_as_it_computes,
    config_of,
    dtype_of_computing,
    model_without_storage,
    shape_for,
    traced,
)
from estimate.planned import check_optimizer, options_of_plan
from parallel.ds_config import offloaded
from parallel.fsdp_config import fsdp_name
from training.flops import fastest, measure_peak

GB = 1e9
# Bytes of each fp32 parameter that an optimizer step passes over. Adam reads weight, gradient and two moments, and
# writes all but the gradient; without a fused kernel that is 20 passes of single operations
ADAM = {"adamw_torch_fused": 7 * FP32, "adamw_torch": 20 * FP32}
CLIPPING = 3 * FP32  # the norm reads the gradient, scaling reads and writes it
ADDING = 3  # passes over a gradient, as a further micro batch adds to it
# Assumed of each rank where a GPU's states are offloaded, not measured: 16 lanes of PCIe 3.0, and what one of four
# ranks has of eight channels of DDR4, of which programs reach half
PCIE = 12 * GB
CPU_MEMORY = 25 * GB
COPIED_ON_CPU = 32 * 2**20  # bytes: with the copy more than caches hold
COPIED_ON_GPU = 256 * 2**20
BACKWARD = 2 / 3  # of the time of forward and backward pass
# Operations that give another view of a tensor, or memory without content
FREE = ("detach", "_unsafe_view", "alias", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided")
# Of their first tensor they read as much as they return, or overwrite it unread
LOOKUPS = ("embedding", "gather", "index", "index_select", "nll_loss_forward")
OVERWRITE = ("copy_", "zero_", "fill_")


@dataclass(frozen=True)
class Rates:
    """Of one rank, while all ranks work. bus: as nccl-tests defines it, None where nothing is known."""

    matmul: float  # operations per second
    memory: float  # bytes per second, those read and those written
    bus: float | None = None  # bytes per second


@dataclass(frozen=True)
class Batch:
    """A micro batch as it is computed. counted: tokens whose labels count in the loss."""

    size: int
    length: int
    counted: int


@dataclass(frozen=True)
class Step:
    """Seconds of an optimizer step. hidden: of the communication, that part which runs beside the computing."""

    compute: float
    optimizer: float
    communication: float
    hidden: float
    samples: int

    @property
    def seconds(self) -> float:
        return self.compute + self.optimizer + self.communication - self.hidden

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds


def predict_step(options: Options, rates: Rates, batch: Batch | None = None) -> Step:
    """batch: by default as the flags say, of the full length. Raises WorkshopError (exit code 2)."""
    check_optimizer(options)
    values = options.values
    if values["torch_compile"]:
        raise options.error("torch_compile", "joins operations, and how fast they are is not known", "leave it out")
    accumulation = values["gradient_accumulation_steps"]
    shape = shape_for(options)
    compute = accumulation * seconds_of(work_of(options, batch or full_batch(options)), rates)
    compute += (accumulation - 1) * ADDING * bytes_of_gradient(options) * shape.parameters / rates.memory
    in_passes, behind_them = sent(shape, options)
    bus = rates.bus or float("inf")
    communication = (in_passes + behind_them) / bus + offloaded_parameters(shape, options)
    return Step(
        compute=compute,
        optimizer=optimizer_step(shape, options, rates),
        communication=communication,
        hidden=min(in_passes / bus, room_to_hide(options, compute)),
        samples=values["per_device_train_batch_size"] * accumulation * values["gpus"],
    )


def full_batch(options: Options) -> Batch:
    size = options.values["per_device_train_batch_size"]
    length = options.values["max_length"]
    return Batch(size, length, counted=size * length)


# 1. Computing


def work_of(options: Options, batch: Batch) -> Counter:
    fsdp_config = options.fsdp_config or {}
    again = bool(options.values["activation_checkpointing"] or fsdp_config.get("activation_checkpointing"))
    chunked = options.values["loss"] == "chunked"
    return traced(
        work,
        options,
        config_of(options),
        batch,
        precision_name(options.values),
        casts_as_it_computes(options),
        again,
        chunked,
    )


@lru_cache
def work(
    config_json: str, batch: Batch, precision: str, autocast: bool, again: bool, chunked: bool
) -> Counter[tuple[int, int]]:
    """(operations of matrix products, bytes) of everything that forward and backward pass do, and how often.

    autocast: of `casts_as_it_computes`. again: with activation checkpointing. chunked: the loss.
    """
    counting = CountWork()
    with model_without_storage(config_json, precision, autocast) as model:
        tokens = torch.ones(batch.size, batch.length, dtype=torch.long)
        if again:
            # random numbers are not saved: there are none
            model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        if chunked:
            loss_in_head(model, batch.counted)
        with counting:
            output = model(input_ids=tokens, attention_mask=tokens, labels=None if chunked else tokens, use_cache=False)
            (output.logits if chunked else output.loss).backward()
    return counting.work


class CountWork(TorchDispatchMode):
    """Notes the work of each operation that PyTorch starts, also of those of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (func.is_view or name in FREE or func.namespace == "prim"):  # prim: questions such as where it lies
            self.work[matmul_operations(func, args, kwargs or {}, result), bytes_moved(name, args, result)] += 1
        return result


def matmul_operations(func: Any, args: tuple, kwargs: dict, result: Any) -> int:
    packet = func.overloadpacket
    if packet.__name__.startswith("_scaled_dot_product") and packet not in flop_registry:
        # PyTorch has a formula for the GPU's kernels alone
        backward = "_backward" if packet.__name__.endswith("_backward") else ""
        packet = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{backward}")
    formula = flop_registry.get(packet)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def bytes_moved(name: str, args: tuple, result: Any) -> int:
    """Tensors that are read, and those that are written. What stands in `out` is the result."""
    read = [bytes_of(value) for value in tree_leaves(args)]
    written = sum(bytes_of(value) for value in tree_leaves(result))
    if name in LOOKUPS:
        read[0] = min(read[0], written)
    if name in OVERWRITE:
        read[0] = 0
    return sum(read) + written


def bytes_of(value: object) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())  # less where it is expanded


def loss_in_head(model: Any, counted: int) -> None:
    """The chunked loss of a batch with so many tokens that count, of which a tensor without values tells nothing."""
    from training.chunked_loss import CrossEntropyOfHead

    head = model.get_output_embeddings()
    targets = torch.zeros(counted, dtype=torch.long)
    head.forward = lambda hidden: CrossEntropyOfHead.apply(hidden.flatten(0, -2)[:counted], head.weight, targets, True)


def seconds_of(found: Counter, rates: Rates) -> float:
    return sum(
        times * max(operations / rates.matmul, moved / rates.memory) for (operations, moved), times in found.items()
    )


# 2. The optimizer


def optimizer_step(shape: Shape, options: Options, rates: Rates) -> float:
    """Seconds: of a rank's share, all bytes that clipping and Adam pass over."""
    psi = shape.parameters
    values = options.values
    adam = ADAM[getattr(values["optim"], "value", values["optim"])]
    clipping = CLIPPING if values["max_grad_norm"] else 0
    if not options.deepspeed_config:
        share = psi / (options.fsdp_config["dp_shard_size"] if options.fsdp_config is not None else 1)
        on_cpu = (options.fsdp_config or {}).get("cpu_offload", False)
        return share * (adam + clipping) / (CPU_MEMORY if on_cpu and has_gpu(options) else rates.memory)
    zero = options.deepspeed_config["zero_optimization"]
    stage = zero.get("stage", 0)
    share = psi / (values["gpus"] if stage > 0 else 1)
    computed = bytes_of_weight(options)
    passes = ADAM["adamw_torch_fused"] + clipping  # of DeepSpeed's own Adam
    if stage > 0 or computed == HALF:
        passes += 2 * (computed + FP32)  # gradients to fp32, and the masters back to the precision of the computation
    if not (offloaded(zero, "optimizer") and has_gpu(options)):
        return share * passes / rates.memory
    return share * (passes / CPU_MEMORY + 2 * computed / PCIE)


def bytes_of_weight(options: Options) -> int:
    """As the model computes with it."""
    return dtype_of_computing(precision_name(options.values)).itemsize


def bytes_of_gradient(options: Options) -> int:
    return FP32 if casts_as_it_computes(options) else bytes_of_weight(options)


def has_gpu(options: Options) -> bool:
    return not options.values["use_cpu"]


# 3. Communication
#
# Psi parameters, n ranks, a micro batches in a step, c bytes of a weight as it is computed with. A ring sends
# (n - 1) / n of a tensor in an all-gather and a reduce-scatter, and twice that in an all-reduce. Real trainings send
# the same: benchmarks/communication.py has counted it, and docs/collectives.md shows it.


def sent(shape: Shape, options: Options) -> tuple[float, float]:
    """Bytes that each rank sends in an optimizer step: in forward and backward passes, and behind them."""
    psi = shape.parameters
    n = options.values["gpus"]
    a = options.values["gradient_accumulation_steps"]
    c = bytes_of_weight(options)
    blocks = sum(shape.block_sizes)
    if options.fsdp_config is not None:
        f = options.fsdp_config["dp_shard_size"]
        gathered = psi if "SHARD_GRAD_OP" in fsdp_name(options.fsdp_config) else psi + blocks
        scattered = psi  # once in a step
        replicas = 2 * ring(n // f) * c * psi / f  # all-reduce of the share, by HYBRID_SHARD
        return ring(f) * c * (a * gathered + scattered) + replicas, 0
    if not options.deepspeed_config:
        return 2 * ring(n) * FP32 * psi, 0
    zero = options.deepspeed_config["zero_optimization"]
    stage = zero.get("stage", 0)
    if stage == 3:
        freed = psi > zero.get("stage3_max_reuse_distance", 1e9)  # between forward and backward pass
        gathered = psi + blocks if freed else psi
        return ring(n) * c * a * (gathered + psi), 0
    reduced = a if stage == 2 else 1  # times in a step
    updated = c * psi if stage > 0 else 0  # the weights that each rank has updated
    return 2 * ring(n) * c * reduced * psi, ring(n) * updated


def ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def offloaded_parameters(shape: Shape, options: Options) -> float:
    """Seconds for the share of parameters that is brought to the GPU as each micro batch passes over them."""
    accumulation = options.values["gradient_accumulation_steps"]
    if not has_gpu(options):
        return 0
    if options.deepspeed_config and offloaded(options.deepspeed_config["zero_optimization"], "param"):
        passes = 2  # forward and backward
        return accumulation * passes * bytes_of_weight(options) * shape.parameters / options.values["gpus"] / PCIE
    if (options.fsdp_config or {}).get("cpu_offload"):
        share = FP32 * shape.parameters / options.fsdp_config["dp_shard_size"]  # type: ignore[index]
        return (2 * accumulation + 1) * share / PCIE  # and the gradients back
    return 0


def room_to_hide(options: Options, compute: float) -> float:
    """Seconds in which communication can run beside the computing; none on the CPU, where both need the same cores.

    DDP sends in the backward pass of a step's last micro batch, FSDP and ZeRO-3 in all passes, ZeRO 1 and 2 if
    `overlap_comm` says so, ZeRO-0 behind the passes.
    """
    if not has_gpu(options):
        return 0
    if options.deepspeed_config:
        zero = options.deepspeed_config["zero_optimization"]
        stage = zero.get("stage", 0)
        return compute if stage > 0 and zero.get("overlap_comm", stage == 3) else 0
    if options.fsdp_config is not None:
        return compute
    return BACKWARD * compute / options.values["gradient_accumulation_steps"]


# 4. The command line


def given_rates(options: Options) -> Rates | None:
    """Of the flags; None unless both of those that every training needs are there."""
    values = options.values
    if not (values["matmul_tflops"] and values["memory_bandwidth"]):
        return None
    bus = values["bus_bandwidth"]
    return Rates(values["matmul_tflops"] * 1e12, values["memory_bandwidth"] * GB, bus and bus * GB)


def rates_for(options: Options) -> Rates:
    """Given by flags, and the rest measured here; ranks that are to share the CPU have a share each."""
    values = options.values
    device = torch.device("cuda" if has_gpu(options) else "cpu")
    share = 1 if has_gpu(options) else values["gpus"] // values["nodes"]
    given = values["matmul_tflops"]
    matmul = given * 1e12 if given else measure_peak(compute_dtype(values), device) / share
    given = values["memory_bandwidth"]
    memory = given * GB if given else measure_copy(device) / share
    bus = values["bus_bandwidth"]
    return Rates(matmul, memory, bus and bus * GB)


def measure_copy(device: torch.device) -> float:
    """Bytes per second, those read and those written, of the fastest of the copies that half a second has room for."""
    source = torch.ones(COPIED_ON_GPU if device.type == "cuda" else COPIED_ON_CPU, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / fastest(lambda: target.copy_(source), device)


def step_table(options: Options, rates: Rates) -> str:
    values = options.values
    step = predict_step(options, rates)
    shape = shape_for(options)
    found = work_of(options, full_batch(options))
    accumulation = values["gradient_accumulation_steps"]
    products = accumulation * seconds_of(Counter({key: n for key, n in found.items() if key[0]}), rates)
    batch = f"{accumulation} x {values['per_device_train_batch_size']} x {values['max_length']} tokens"
    place = "GPU(s)" if has_gpu(options) else "rank(s) on the CPU"
    bus = f"{rates.bus / GB:.4g} GB/s between ranks" if rates.bus else "nothing known of what is between ranks"
    sent_bytes = sum(sent(shape, options))
    lines = [
        f"{values['model_name']}: {shape.parameters:,} parameters, {precision_name(values)}, {batch} per rank, "
        f"{values['gpus']} {place} on {values['nodes']} node(s)",
        f"of each rank: {rates.matmul / 1e12:.4g} TFLOP/s in matrix products, {rates.memory / GB:.4g} GB/s of memory, "
        f"{bus}",
        "seconds of an optimizer step",
        f"{'compute':16}{step.compute:10.4g}  matrix products {products:.4g}",
        f"{'optimizer':16}{step.optimizer:10.4g}",
        f"{'communication':16}{step.communication:10.4g}  {sent_bytes / GB:.3g} GB sent by each rank",
    ]
    ways = {"no overlap": 0.0, "full overlap": min(step.compute, step.communication), "expected": step.hidden}
    for name, hidden in ways.items():
        way = Step(step.compute, step.optimizer, step.communication, hidden, step.samples)
        lines += [f"{name:16}{way.seconds:10.4g}  {way.samples_per_second:.4g} samples/s of all ranks"]
    if sent_bytes and not rates.bus:
        lines += ["communication is left out: give --bus_bandwidth, of measure_bandwidth.py"]
    if offloads(options):
        lines += [f"assumed: {PCIE / GB:g} GB/s of PCIe and {CPU_MEMORY / GB:g} GB/s of CPU memory for each rank"]
    if not values["matmul_tflops"] and not has_gpu(options):
        lines += ["This is the CPU here. For a GPU give --matmul_tflops, --memory_bandwidth and --bus_bandwidth."]
    return "\n".join([*lines, "Not counted: starting of operations, data, logging, evaluation, saving."])


def offloads(options: Options) -> bool:
    zero = (options.deepspeed_config or {}).get("zero_optimization", {})
    of_fsdp = (options.fsdp_config or {}).get("cpu_offload", False)
    return has_gpu(options) and (of_fsdp or offloaded(zero, "optimizer") or offloaded(zero, "param"))


def refuse_half_of_the_rates(options: Options) -> None:
    """Raises WorkshopError (exit code 2): the other half would be that of the CPU here."""
    for flag, other in (("matmul_tflops", "memory_bandwidth"), ("memory_bandwidth", "matmul_tflops")):
        if options.values[flag] and not options.values[other]:
            raise options.error(flag, "is one of two rates of a GPU that is elsewhere", f"give --{other}, too")


def main() -> None:
    options = options_of_plan(None, __doc__)
    if not (torch.cuda.is_available() or given_rates(options)):
        refuse_half_of_the_rates(options)
        options = options_of_plan(None, __doc__, gpu=False)
    print(step_table(options, rates_for(options)))


if __name__ == "__main__":
    run_program(main)
