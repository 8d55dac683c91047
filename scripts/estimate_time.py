"""Estimate the time of an optimizer step: computing, optimizer, communication, for every strategy and number of ranks.

    python scripts/estimate_time.py --matmul_tflops 100 --memory_bandwidth 800
    python scripts/estimate_time.py --model_name bigscience/bloom-3b --deepspeed ds_configs/zero3.json --gpus 4 \\
        --matmul_tflops 100 --memory_bandwidth 800 --bus_bandwidth 50

It takes the flags and variables of train.py, and how fast a GPU of the cluster is while all of them work. It is for
planning: nobody has compared it with a GPU yet. docs/memory.md explains the rows.

Computing is a roofline (doi:10.1145/1498765.1498785): each operation of one micro batch takes as long as its arithmetic
at the speed of matrix products, or as long as its tensors at the speed of the memory, whichever is more. The rest is
bytes over bandwidth: of the weights, gradients and moments that the optimizer passes over, and of what a rank sends.
"""

from collections import Counter, deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from distributed.ds_config import offloaded
from distributed.fsdp_config import fsdp_name
from estimate.command_line import RATES, check_optimizer, options_of_plan
from estimate.memory import size_of
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
from settings.command_line import Options, precision_name
from shared.errors import WorkshopError, run_program

GB = 1e9
# Bytes of each fp32 parameter: a fused Adam reads weight, gradient and two moments, and writes all but the gradient;
# clipping reads the gradient for its norm, and reads and writes it once more
OPTIMIZER = (7 + 3) * FP32
BACKWARD = 2 / 3  # of the time of forward and backward pass
# Operations that give another view of a tensor, or memory without content
FREE = ("detach", "_unsafe_view", "alias", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided")


@dataclass(frozen=True)
class Rates:
    """Of one rank, while all ranks work. bus: as nccl-tests defines it, infinite where nothing is known."""

    matmul: float  # operations per second
    memory: float  # bytes per second, those read and those written
    bus: float  # bytes per second


@dataclass(frozen=True)
class Step:
    """Seconds of an optimizer step. hidden: of the communication, that part which runs beside the computing."""

    compute: float
    optimizer: float
    communication: float
    hidden: float

    @property
    def seconds(self) -> float:
        return self.compute + self.optimizer + self.communication - self.hidden


def predict_step(options: Options, rates: Rates) -> Step:
    """Of sequences of --max_length. Raises WorkshopError (exit code 2) for what is not known."""
    check_optimizer(options)
    if options.values["torch_compile"]:
        raise options.error("torch_compile", "joins operations, and how fast they are is not known", "leave it out")
    if options.values["tensor_parallel"] > 1:
        what = "how long the ranks wait for each other in each block is not known"
        raise options.error("tensor_parallel", what, "measure it with --max_steps 10")
    if offloads(options):
        way_out = "take a config without offload, and measure what offload costs with --max_steps 10"
        raise WorkshopError("offload", "how fast the CPU and its memory are is not known", way_out)
    shape = shape_for(options)
    compute = options.values["gradient_accumulation_steps"] * seconds_of(work_of(options), rates)
    communication = sent(shape, options) / rates.bus
    return Step(
        compute=compute,
        optimizer=optimizer_step(shape, options, rates),
        communication=communication,
        hidden=min(communication, room_to_hide(options, compute)),
    )


# 1. Computing


def work_of(options: Options) -> Counter:
    values = options.values
    fsdp_config = options.fsdp_config or {}
    again = bool(values["activation_checkpointing"] or fsdp_config.get("activation_checkpointing"))
    size = (values["per_device_train_batch_size"], values["max_length"])
    precision = precision_name(values)
    return traced(
        work, options, config_of(options), *size, precision, casts_as_it_computes(options), values["attention"], again
    )


@lru_cache
def work(
    config_json: str, batch: int, length: int, precision: str, autocast: bool, attention: str | None, again: bool
) -> Counter[tuple[int, int]]:
    """(operations of matrix products, bytes) of everything that forward and backward pass do, and how often.

    autocast: of `casts_as_it_computes`. attention: of --attention. again: with activation checkpointing.
    """
    counting = CountWork()
    with model_without_storage(config_json, precision, autocast, attention) as model:
        tokens = torch.ones(batch, length, dtype=torch.long)
        if again:
            # random numbers are not saved: there are none
            model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        # attention written out: PyTorch counts no operations of the CPU's fused one
        with sdpa_kernel(SDPBackend.MATH), counting:
            model(input_ids=tokens, attention_mask=tokens, labels=tokens, use_cache=False).loss.backward()
    return counting.work


class CountWork(TorchDispatchMode):
    """Notes the work of each operation that PyTorch starts, also of those of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not (func.is_view or name in FREE or func.namespace == "prim"):  # prim: questions such as where it lies
            formula = flop_registry.get(func.overloadpacket)
            operations = formula(*args, **kwargs, out_val=result) if formula else 0
            self.work[operations, bytes_of(args) + bytes_of(result)] += 1
        return result


def bytes_of(tree: object) -> int:
    """Of all tensors in it; an expanded one has as many as it stores."""
    tensors = [value for value in tree_leaves(tree) if isinstance(value, torch.Tensor)]
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


def seconds_of(found: Counter, rates: Rates) -> float:
    return sum(
        times * max(operations / rates.matmul, moved / rates.memory) for (operations, moved), times in found.items()
    )


# 2. The optimizer


def optimizer_step(shape: Shape, options: Options, rates: Rates) -> float:
    """Seconds: of a rank's share, all bytes that clipping and Adam pass over."""
    ranks = 1
    passes = OPTIMIZER
    if options.fsdp_config is not None:
        ranks = options.fsdp_config["dp_shard_size"]
    if options.deepspeed_config:
        if zero_of(options).get("stage", 0) > 0:
            ranks = options.values["gpus"]
        if bytes_of_weight(options) == HALF:
            passes += 2 * (HALF + FP32)  # gradients to fp32, and the masters back to 16 bit
    return passes * shape.parameters / ranks / rates.memory


def zero_of(options: Options) -> dict:
    return (options.deepspeed_config or {}).get("zero_optimization", {})


def bytes_of_weight(options: Options) -> int:
    """As the model computes with it."""
    return dtype_of_computing(precision_name(options.values)).itemsize


def offloads(options: Options) -> bool:
    zero = zero_of(options)
    of_fsdp = (options.fsdp_config or {}).get("cpu_offload", False)
    return of_fsdp or offloaded(zero, "optimizer") or offloaded(zero, "param")


# 3. Communication
#
# Psi parameters, n ranks, a micro batches in a step, c bytes of a weight as it is computed with. A ring sends
# (n - 1) / n of a tensor in an all-gather and a reduce-scatter, and twice that in an all-reduce. A reduce takes it too,
# as the mean of all ranks, because its owner sends nothing. Real trainings send the same: benchmarks/communication.py
# has counted it, and docs/collectives.md shows it.


@dataclass(frozen=True)
class Ring:
    """`ranks` ranks that send in a circle, each `distance` behind the one before; the other ranks form others like it.

    size: bytes that each would send in an optimizer step if the ranks were very many.
    """

    ranks: int
    distance: int
    size: float

    @property
    def sent(self) -> float:
        return (self.ranks - 1) / self.ranks * self.size

    def sent_between_nodes(self, gpus: int, gpus_per_node: int) -> float:
        """Mean of all ranks: of a ring over whole nodes one rank of each sends to the next node, and the others do
        not."""
        nodes_of_links = ((rank // gpus_per_node, self.after(rank) // gpus_per_node) for rank in range(gpus))
        return self.sent * sum(here != there for here, there in nodes_of_links) / gpus

    def after(self, rank: int) -> int:
        place = rank // self.distance % self.ranks
        return rank + self.distance * ((place + 1) % self.ranks - place)


def sent(shape: Shape, options: Options) -> float:
    """Bytes that each rank sends in an optimizer step, with tensor parallelism those of activations, too."""
    return sum(ring.sent for ring in rings(shape, options))


def sent_between_nodes(shape: Shape, options: Options) -> float:
    """What of `sent` leaves the node, if rings go through one node after the other (mean of all ranks)."""
    gpus = options.values["gpus"]
    gpus_per_node = gpus // options.values["nodes"]
    return sum(ring.sent_between_nodes(gpus, gpus_per_node) for ring in rings(shape, options))


def rings(shape: Shape, options: Options) -> list[Ring]:
    """Those that a rank stands in. Ranks of a shard and of a tensor group have numbers in a row (order of the meshes
    of accelerate and transformers)."""
    psi = shape.parameters
    n = options.values["gpus"]
    a = options.values["gradient_accumulation_steps"]
    c = bytes_of_weight(options)
    blocks = sum(shape.block_sizes)
    tensor_parallel = options.values["tensor_parallel"]
    if tensor_parallel > 1:
        in_group = Ring(tensor_parallel, 1, a * shape.exchanged)
        if options.fsdp_config is None:
            return [in_group, Ring(n, 1, 2 * FP32 * shape.uncut)]  # the Trainer averages the gradients of what is whole
        return [in_group, Ring(n // tensor_parallel, tensor_parallel, FP32 * (a * (psi + blocks) + psi))]
    if options.fsdp_config is not None:
        f = options.fsdp_config["dp_shard_size"]
        gathered = psi if "SHARD_GRAD_OP" in fsdp_name(options.fsdp_config) else psi + blocks
        replicas = Ring(n // f, f, 2 * c * psi / f)  # all-reduce of the share, by HYBRID_SHARD
        return [Ring(f, 1, c * (a * gathered + psi)), replicas]  # gradients once in a step
    if not options.deepspeed_config:
        return [Ring(n, 1, 2 * FP32 * psi)]
    zero = zero_of(options)
    stage = zero.get("stage", 0)
    if stage == 3:
        return [Ring(n, 1, c * a * (gathered_by_zero3(shape, zero) + psi))]
    # DeepSpeed 0.19.8: stages 1 and 2 all-reduce each bucket, unless this key makes them reduce it to the owners
    to_owner = stage > 0 and not zero.get("use_multi_rank_bucket_allreduce", True)
    reduced = (1 if to_owner else 2) * (a if stage == 2 else 1)  # stage 2: in each micro batch
    updated = 1 if stage > 0 else 0  # all-gather of the weights that each rank has updated
    return [Ring(n, 1, c * (reduced + updated) * psi)]


def gathered_by_zero3(shape: Shape, zero: dict) -> int:
    """Elements of all that ZeRO-3 gathers in a micro batch: of each parameter as many as it has, each time.

    It goes through the modules as DeepSpeed does (0.19.8, runtime/zero/partitioned_param_coordinator.py). Before one
    computes, its parameters are gathered, and the next ones ahead while there is room. Behind it they are dropped,
    unless they are used again soon, or the look ahead has come past their next use and found them still there.
    """
    most_live = zero.get("stage3_max_live_parameters", 1e9)
    soon = zero.get("stage3_max_reuse_distance", 1e9)
    bucket = size_of(zero, "stage3_prefetch_bucket_size", 0.9 * shape.hidden**2, 5e7)
    never_sharded = size_of(zero, "stage3_param_persistence_threshold", 10 * shape.hidden, 1e5)
    sizes = shape.sizes
    forward = [[parameter for parameter in call if sizes[parameter] > never_sharded] for call in shape.calls]
    calls = forward + forward[::-1]  # and the backward pass
    uses = deque((parameter, time) for time, call in enumerate(calls) for parameter in call)
    last_use_seen: dict[int, int] = {}
    live: set[int] = set()
    gathered = 0

    def gather(parameter: int) -> int:
        if parameter in live:
            return 0
        live.add(parameter)
        return sizes[parameter]

    def look_ahead() -> int:
        parameter, time = uses.popleft()
        last_use_seen[parameter] = time
        return gather(parameter)

    for time, call in enumerate(calls):
        gathered += sum(map(gather, call))
        while uses and uses[0][1] <= time:
            look_ahead()
        room = min(bucket, most_live - sum(sizes[parameter] for parameter in live))
        ahead = 0
        while uses and ahead < room:
            ahead += look_ahead()
        gathered += ahead
        distance = 0
        kept = {parameter for parameter in call if last_use_seen[parameter] > time + 1}
        for later in calls[time + 1 :]:
            if distance >= soon:
                break
            kept.update(later)
            distance += sum(sizes[parameter] for parameter in later)
        live -= set(call) - kept
    return gathered


def room_to_hide(options: Options, compute: float) -> float:
    """Seconds in which communication can run beside the computing.

    DDP sends in the backward pass of a step's last micro batch, FSDP and ZeRO-3 in all passes, ZeRO 1 and 2 if
    `overlap_comm` says so, ZeRO-0 behind the passes.
    """
    if options.fsdp_config is not None:
        return compute
    if not options.deepspeed_config:
        return BACKWARD * compute / options.values["gradient_accumulation_steps"]
    stage = zero_of(options).get("stage", 0)
    return compute if stage > 0 and zero_of(options).get("overlap_comm", stage == 3) else 0


# 4. The command line


def given_rates(options: Options) -> Rates | None:
    """Of the flags; None unless both of those that every training needs are there."""
    matmul, memory, bus = (options.values[flag] for flag in RATES)
    if not matmul or not memory:
        return None
    return Rates(matmul * 1e12, memory * GB, (bus or float("inf")) * GB)


def step_table(options: Options, rates: Rates) -> str:
    values = options.values
    step = predict_step(options, rates)
    shape = shape_for(options)
    accumulation = values["gradient_accumulation_steps"]
    products = Counter({key: times for key, times in work_of(options).items() if key[0]})
    batch = f"{accumulation} x {values['per_device_train_batch_size']} x {values['max_length']} tokens"
    lines = [
        f"{values['model_name']}: {shape.parameters:,} parameters, {precision_name(values)}, {batch} per rank, "
        f"{values['gpus']} GPU(s) on {values['nodes']} node(s)",
        f"of each rank: {rates.matmul / 1e12:.4g} TFLOP/s in matrix products, {rates.memory / GB:.4g} GB/s of memory, "
        f"{rates.bus / GB:.4g} GB/s between ranks",
        "seconds of an optimizer step",
        f"{'compute':16}{step.compute:10.4g}  matrix products {accumulation * seconds_of(products, rates):.4g}",
        f"{'optimizer':16}{step.optimizer:10.4g}",
        f"{'communication':16}{step.communication:10.4g}  {sent(shape, options) / GB:.3g} GB sent by each rank",
    ]
    none_hidden = step.seconds + step.hidden
    all_hidden = none_hidden - min(step.compute, step.communication)
    samples = values["per_device_train_batch_size"] * accumulation * values["gpus"]
    for name, seconds in (("no overlap", none_hidden), ("full overlap", all_hidden), ("expected", step.seconds)):
        lines += [f"{name:16}{seconds:10.4g}  {samples / seconds:.4g} samples/s of all ranks"]
    if values["gpus"] > 1 and not values["bus_bandwidth"]:
        lines += ["communication is left out: give --bus_bandwidth, of measure_bandwidth.py"]
    if values["attention"] == "sdpa":
        lines += ["attention is counted as if its scores went through memory: how much SDPA saves is not known"]
    return "\n".join([*lines, "Not counted: starting of operations, data, logging, evaluation, saving."])


def main() -> None:
    options = options_of_plan(None, __doc__)
    rates = given_rates(options)
    if rates is None:
        what = "how fast the GPUs are is not known"
        raise WorkshopError("--matmul_tflops, --memory_bandwidth", what, "give both; docs/memory.md says where from")
    print(step_table(options, rates))


if __name__ == "__main__":
    run_program(main)
