"""Estimate the memory of a training run, part by part, on a GPU and on its node. docs/memory.md explains the parts."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache

import psutil

from distributed.ds_config import offloaded
from distributed.strategy import Strategy, choose_strategy
from estimate.model_shape import FP32, PASSES, Shape, recomputes_blocks, trace_shape, weight_bytes
from settings.optimizers import Optimizer, choose_optimizer
from settings.settings import Settings

# The estimate divides an optimizer step into these intervals. The interval with the most memory has the peak
INTERVALS = (*PASSES, "step")
STEP = ("step",)
GRADIENTS_COMPLETE = ("embedding", "step")  # intervals in which all gradients exist, in a step with one backward pass
PINNED_UNUSED = "pinned, unused"
ZERO_GRADIENTS = (  # notes for ZeRO stages 0 to 3
    "whole",
    "whole until the last backward pass of a step",
    "the shard; tensors on its edges are whole",
    "the shard",
)


@dataclass(frozen=True)
class MemoryPart:
    """A part of one rank's memory, in bytes on its GPU and on its node.

    intervals: the intervals of a step in which the rank holds the part. while_loading: the part exists only while
    weights are loaded, before the training. from_start: the part exists while weights are loaded and in the training.
    by_one_rank: only one rank of the job holds the part.
    """

    name: str
    gpu: float
    cpu: float = 0
    note: str = ""
    intervals: tuple[str, ...] = INTERVALS
    while_loading: bool = False
    from_start: bool = False
    by_one_rank: bool = False


def estimate_parts(
    settings: Settings, config_json: str | None = None, python: MemoryPart | None = None
) -> list[MemoryPart]:
    """Estimate all parts of the memory, for the rank that holds most.

    config_json: the model's configuration, by default looked up by the model's name. python: the memory of Python, by
    default measured in this process. Raises WorkshopError (exit code 2) for an unknown model.
    """
    shape = trace_shape(settings, config_json)
    return [*state_parts(shape, settings), *pass_parts(shape, settings), python or measure_python()]


def state_parts(shape: Shape, settings: Settings) -> list[MemoryPart]:
    """Estimate parameters, gradients, optimizer state and buffers, and the weights while they are loaded."""
    compute_bytes = weight_bytes(settings)
    strategy = choose_strategy(settings, settings.estimate.gpus)
    ranks = strategy.degrees.groups
    accumulates = settings.trainer.gradient_accumulation_steps > 1
    optimizer = choose_optimizer(settings)
    if settings.deepspeed_config is not None:
        return deepspeed_parts(shape, settings.zero, ranks, accumulates, compute_bytes, optimizer)
    if settings.fsdp_config is not None:
        # With tensor parallelism FSDP gathers fp32 weights, and autocast casts them for each operation
        gathered_bytes = FP32 if strategy.autocasts else compute_bytes
        return fsdp_parts(shape, settings.fsdp_config, strategy, accumulates, gathered_bytes, optimizer)
    return unsharded_parts(shape, ranks, accumulates, compute_bytes, optimizer)


def pass_parts(shape: Shape, settings: Settings) -> list[MemoryPart]:
    """Estimate the bytes that the passes of a micro batch need beyond the model state, in each interval."""
    kept = "kept for the backward pass"
    if recomputes_blocks(settings):
        kept = "checkpointed: inputs of all blocks, activations of one"
    loss, scores = "loss", "logits of a chunk"
    if settings.model.loss == "full":
        loss, scores = "logits", "at the peak: log-softmax and two gradients, in fp32"
    parts = []
    for interval, peak in shape.peaks.items():
        parts += [
            MemoryPart("activations", peak.activations, note=kept, intervals=(interval,)),
            MemoryPart(loss, peak.logits, note=scores, intervals=(interval,)),
            MemoryPart("head", peak.head, note="copies of its weight, gradients being added up", intervals=(interval,)),
        ]
    return [part for part in parts if part.gpu]


@cache
def measure_python() -> MemoryPart:
    """Measure the memory of this process, which has imported nearly the same libraries as a training run."""
    own = psutil.Process().memory_info().rss
    return MemoryPart("Python, libraries", 0, own, "measured in this process", from_start=True)


# 1. Trainer and DDP


def unsharded_parts(
    shape: Shape, ranks: int, accumulates: bool, compute_bytes: int, optimizer: Optimizer
) -> list[MemoryPart]:
    """Estimate fp32 weights, gradients and optimizer state, unsharded on every rank: with AdamW (4 + 4 + 8) Psi bytes.

    accumulates: whether a step has several backward passes. If so, gradients exist from the first pass on.
    """
    trained = FP32 * shape.trainable
    if ranks > 1:
        buckets = MemoryPart("buffers", trained, note="DDP's gradient buckets")
    else:
        buckets = MemoryPart("buffers", 0, note="no gradients to average")
    weights = "frozen weights, fp32 adapters" if shape.frozen else "fp32 weights"
    return [
        MemoryPart("parameters", trained + compute_bytes * shape.frozen, note=weights),
        MemoryPart("gradients", trained, note="fp32", intervals=INTERVALS if accumulates else GRADIENTS_COMPLETE),
        MemoryPart("optimizer state", optimizer.state_bytes * shape.trainable, note=f"{optimizer.state}, fp32"),
        buckets,
        weights_while_loading(shape.model),
    ]


# 2. DeepSpeed ZeRO
#
# The symbols are those of the ZeRO paper (arXiv:1910.02054, sections 3.1 and 5): Psi parameters, N_d ranks, and the
# multiplier K = 12 of Adam's state in mixed precision. A rank holds, in bytes:
#     without ZeRO    2 Psi + 2 Psi + K Psi
#     stage 1         2 Psi + 2 Psi + K Psi / N_d              (P_os)
#     stage 2         2 Psi + (2 Psi + K Psi) / N_d            (P_os+g)
#     stage 3         (2 Psi + 2 Psi + K Psi) / N_d            (P_os+g+p)
# The factor 2 is compute_bytes in the code, because it is 4 in fp32. Comments explain where DeepSpeed holds more. With
# LoRA the second and the third term count only the trained parameters, and so do the buffers.


def deepspeed_parts(
    shape: Shape, zero: dict, n_d: int, accumulates: bool, compute_bytes: int, optimizer: Optimizer
) -> list[MemoryPart]:
    """Estimate the model state under DeepSpeed. accumulates: whether a step has several backward passes."""
    trained = shape.trainable
    stage = zero.get("stage", 0)
    parameters: float = compute_bytes * shape.parameters
    gradients: float = compute_bytes * trained
    optimizer_state: float = (FP32 + optimizer.state_bytes) * trained  # K Psi
    if stage == 0 and compute_bytes == FP32:
        optimizer_state -= FP32 * trained  # fp32 weights need no separate masters
    if stage >= 1:
        optimizer_state /= n_d
    if stage == 2:
        gradients = compute_bytes * max(map(sum, stage2_gradients(shape.trained_sizes, n_d)))
    if stage == 3:
        gradients /= n_d
        parameters /= n_d
    on_cpu = offloaded(zero, "optimizer")
    state = f"fp32 masters, {optimizer.state}"
    if stage == 0 and compute_bytes == FP32:
        state = f"{optimizer.state}; the weights are their own masters"
    # Stage 3 and optimizer offload allocate their gradient buffer at the start
    exist = INTERVALS if accumulates or stage == 3 or on_cpu else GRADIENTS_COMPLETE
    parts = [
        MemoryPart(
            "parameters",
            *gpu_and_cpu_bytes(parameters, offloaded(zero, "param")),
            "the shard" if stage == 3 else "whole",
            from_start=stage == 3,
        ),
        MemoryPart("gradients", *gpu_and_cpu_bytes(gradients, on_cpu and stage >= 2), ZERO_GRADIENTS[stage], exist),
        MemoryPart("optimizer state", *gpu_and_cpu_bytes(optimizer_state, on_cpu), state),
        *zero_buffers(shape, zero, n_d, compute_bytes),
        weights_while_loading(shape.model, by_one_rank=stage == 3),
    ]
    if on_cpu or offloaded(zero, "param"):
        parts.append(
            pinned_rounding(
                pinned_blocks(shape, zero, n_d, compute_bytes),
                kept=pinned_while_loading(shape, zero, n_d, compute_bytes),
            )
        )
    return parts


def zero_buffers(shape: Shape, zero: dict, n_d: int, compute_bytes: int) -> list[MemoryPart]:
    """Estimate temporary buffers (ZeRO paper, section 3.2), and the gathered parameters of stage 3."""
    trained = shape.trainable
    stage = zero.get("stage", 0)
    on_cpu = offloaded(zero, "optimizer")
    if stage == 0:
        # The 16-bit optimizer copies all gradients to fp32 for its step
        copies = 0 if compute_bytes == FP32 else FP32 * trained
        return [MemoryPart("buffers", copies, note="fp32 gradients", intervals=STEP)]
    # Gradients are reduced in buckets. With "auto" in the file, a bucket has hidden_size^2 elements
    bucket = compute_bytes * min(zero_size(zero, "reduce_bucket_size", shape.hidden**2, 5e8), trained)
    # The optimizer step needs fp32 gradients of the rank's shard: 4 Psi / N_d
    shard = FP32 * trained / n_d
    in_step = MemoryPart("buffers", *gpu_and_cpu_bytes(shard, on_cpu), "fp32 gradients of the shard", STEP)
    if stage == 3:
        # DeepSpeed gathers parameters before their use, up to a limit, and prefetches the next ones. A single rank
        # without parameter offload has all parameters on its GPU and gathers nothing
        gathered = 0.0
        if n_d > 1 or offloaded(zero, "param"):
            # LoRA's frozen embedding is freed before the peak
            live = min(shape.used_in_backward_pass, zero.get("stage3_max_live_parameters", 1e9))
            prefetch = zero_size(zero, "stage3_prefetch_bucket_size", 0.9 * shape.hidden**2, 5e7)
            gathered = compute_bytes * (live + prefetch)
        note = "bucket, parameters gathered at a time"
        return [MemoryPart("buffers", bucket + gathered, note=note, intervals=PASSES), in_step]
    if on_cpu:
        # Gradients move to the CPU through a buffer of the largest gradient's size on each side. The CPU keeps a 16-bit
        # copy of the updated shard, which moves back to the GPU
        largest = compute_bytes * max(shape.trained_sizes)
        updated_shard = compute_bytes * trained / n_d
        return [
            MemoryPart("buffers", bucket + largest, note="bucket, transfers", intervals=PASSES),
            MemoryPart("buffers", 0, shard + largest + updated_shard, "fp32 gradients, transfers"),
        ]
    return [MemoryPart("buffers", bucket, note="bucket", intervals=PASSES), in_step]


def stage2_gradients(sizes: tuple[int, ...], n_d: int) -> list[list[int]]:
    """Return, for each rank, the elements of each gradient that it keeps under ZeRO-2.

    DeepSpeed concatenates all parameters and cuts them into equal parts. A gradient that spans an edge between two
    parts stays whole on both ranks.
    """
    part = math.ceil(sum(sizes) / n_d)
    ends = list(itertools.accumulate(sizes))
    kept = []
    for rank in range(n_d):
        first = rank * part
        last = first + part
        kept.append([size for size, end in zip(sizes, ends, strict=True) if end > first and end - size < last])
    return kept


def pinned_blocks(shape: Shape, zero: dict, n_d: int, compute_bytes: int) -> list[float]:
    """Sizes in bytes of the buffers that DeepSpeed pins with offload_optimizer, offload_param or both."""
    shard = shape.trainable / n_d
    sizes = []
    if offloaded(zero, "param"):
        sizes.append(compute_bytes * shard)  # these bytes are pinned even with "pin_memory": false
        if zero["offload_param"].get("pin_memory", True):  # frozen parameters stay in the blocks of their loading
            sizes += [compute_bytes * size / n_d for size in shape.frozen_sizes]
    if not offloaded(zero, "optimizer") or not zero["offload_optimizer"].get("pin_memory", True):
        return sizes
    if zero.get("stage") == 3:
        sizes.append(compute_bytes * shard)  # gradients
        group = zero.get("sub_group_size", 1e9)  # elements of a group of fp32 gradients
        whole_groups, rest = divmod(shard, group)
        return [*sizes, *[FP32 * group] * int(whole_groups), FP32 * rest]
    sizes += [FP32 * shard, FP32 * shard]  # masters and their gradients
    # Buffers for the transfers of the shard and of the largest gradient
    sizes += [compute_bytes * shard, compute_bytes * max(shape.trained_sizes)]
    if zero.get("stage") == 2:
        # Each gradient is a block of its own. The estimate assumes the blocks of rank 0, which has the embedding
        sizes += [compute_bytes * size for size in stage2_gradients(shape.trained_sizes, n_d)[0]]
    return sizes


def pinned_while_loading(shape: Shape, zero: dict, n_d: int, compute_bytes: int) -> float:
    """Bytes of pinned blocks that ZeRO-3 frees after loading. PyTorch caches these blocks and never uses them again."""
    if not offloaded(zero, "param") or not zero["offload_param"].get("pin_memory", True):
        return 0
    return sum(power_of_two(compute_bytes * size / n_d) for size in shape.trained_sizes)


def zero_size(zero: dict, key: str, by_model: float, default: float) -> float:
    """Return a size of the ZeRO config.

    by_model: the value with which the Trainer replaces "auto". default: DeepSpeed's default for a missing key.
    """
    value = zero.get(key, default)
    return by_model if value == "auto" else value


# 3. FSDP
#
# The symbols are those of the FSDP paper (arXiv:2304.11277, section 3.2): Psi parameters, and the sharding factor F,
# which is the world size for FULL_SHARD and the ranks of a node for HYBRID_SHARD. Unlike ZeRO's, FSDP's shards of the
# parameters are fp32: 4 Psi / F bytes. FSDP gathers a unit in the precision of the computation. With LoRA the shards of
# frozen parameters have this precision, too, and only trained parameters have gradients and optimizer state.


def fsdp_parts(
    shape: Shape,
    config: dict,
    strategy: Strategy,
    accumulates: bool,
    compute_bytes: int,
    optimizer: Optimizer,
) -> list[MemoryPart]:
    """Estimate the model state under FSDP. accumulates: whether a step has several backward passes."""
    f = strategy.degrees.shards
    on_cpu = config.get("cpu_offload", False)
    padded = shape.padded(f)
    shard = FP32 * padded.trainable / f  # 4 Psi / F
    weights = shard + compute_bytes * padded.frozen / f
    if accumulates:
        # The reduce-scatter comes with the last backward pass of a step. Until then gradients stay whole
        gradients = MemoryPart("gradients", compute_bytes * shape.trainable, note="whole while gradients accumulate")
    else:
        gradients = MemoryPart("gradients", *gpu_and_cpu_bytes(shard, on_cpu), "fp32 shard", GRADIENTS_COMPLETE)
    note = "shards of frozen weights, fp32 adapters" if shape.frozen else "fp32 shard"
    parts = [
        MemoryPart("parameters", *gpu_and_cpu_bytes(weights, on_cpu), note, from_start=True),
        gradients,
        MemoryPart(
            "optimizer state",
            *gpu_and_cpu_bytes(optimizer.state_bytes * padded.trainable / f, on_cpu),
            f"{optimizer.state}, fp32 shard",
        ),
        *fsdp_buffers(padded, config, strategy, accumulates, compute_bytes),
        weights_while_loading(shape.model),
    ]
    if on_cpu:  # FSDP pins the shard of each parameter, and its gradient, as a block of its own
        pinned = [FP32 * size / f for size in shape.trained_sizes] * 2
        parts.append(pinned_rounding([*pinned, *(compute_bytes * size / f for size in shape.frozen_sizes)]))
    return parts


def fsdp_buffers(
    shape: Shape, config: dict, strategy: Strategy, accumulates: bool, compute_bytes: int
) -> list[MemoryPart]:
    """Estimate gathered parameters and gradients that are being reduced, in the precision of the computation.

    Each block is a unit of FSDP, and so is an embedding that does not share its weight with the head. The rest is the
    root unit, which stays gathered in both passes.
    """
    psi = shape.parameters
    f = strategy.degrees.shards
    on_cpu = config.get("cpu_offload", False)
    block = max(shape.block_sizes, default=0)
    embedding = sum(shape.sizes[number] for number in shape.embedding)
    root = psi - sum(shape.block_sizes) - embedding
    by_block = config.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP") == "TRANSFORMER_BASED_WRAP"
    if not by_block or not shape.block_sizes:
        block, embedding, root = 0, 0, psi
    # In the interval "blocks", one block is in use while the next block is prefetched
    gathered = {"loss": root, "blocks": root + 2 * block, "embedding": root + embedding}
    if not strategy.regathers:
        gathered = dict.fromkeys(PASSES, psi)
    # The gradients of a block, and their copy for the reduce-scatter. If embedding and head share a weight, the sum of
    # their gradients needs more memory than the reduce-scatter, and pass_parts counts it
    trained = max((shape.trainable_elements(block) for block in shape.blocks), default=0) if block else 0
    reduced = {"loss": 0, "blocks": 2 * trained, "embedding": shape.trainable_elements(shape.embedding)}
    # HYBRID_SHARD averages gradient shards over the replicas, and keeps these shards until the backward pass ends
    averaged = shape.trainable / f if strategy.degrees.replicas > 1 and not accumulates else 0
    parts = []
    for interval in PASSES:
        size = gathered[interval] + reduced[interval] + (averaged if interval != "loss" else 0)
        note = "parameters gathered at a time, gradients being reduced"
        parts.append(MemoryPart("buffers", compute_bytes * size, note=note, intervals=(interval,)))
    if on_cpu and accumulates:  # gradients accumulate on the GPU, but the optimizer steps on the CPU with their shard
        parts.append(MemoryPart("buffers", 0, FP32 * shape.trainable / f, "fp32 gradients", STEP))
    return parts


# 4. The memory of a node


def weights_while_loading(psi: int, by_one_rank: bool = False) -> MemoryPart:
    note = "only in rank 0, before it sends the shards" if by_one_rank else "before they move to the GPU"
    return MemoryPart("weights while loading", 0, FP32 * psi, note, while_loading=True, by_one_rank=by_one_rank)


def gpu_and_cpu_bytes(size: float, on_cpu: bool) -> tuple[float, float]:
    """Return the bytes of a part as (on the GPU, on the CPU)."""
    return (0, size) if on_cpu else (size, 0)


def pinned_rounding(pinned: list[float], kept: float = 0) -> MemoryPart:
    """Estimate the memory that pinned blocks take beyond their content.

    PyTorch's host allocator rounds a block up to a power of two. kept: bytes of cached blocks that are not used.
    """
    extra = sum(power_of_two(size) - size for size in pinned if size > 0)
    return MemoryPart(PINNED_UNUSED, 0, extra + kept, "pinned blocks are rounded up to powers of two")


def power_of_two(size: float) -> int:
    return 1 << (math.ceil(size) - 1).bit_length()


def move_to_cpu(parts: list[MemoryPart]) -> list[MemoryPart]:
    """Move all parts to CPU memory, for a training run without GPUs, which pins nothing."""
    on_cpu = [replace(part, gpu=0, cpu=part.gpu + part.cpu) for part in parts]
    return [part for part in on_cpu if part.name != PINNED_UNUSED]


def totals(parts: list[MemoryPart], ranks_per_node: int) -> tuple[float, float]:
    """Return the bytes of the fullest GPU, and those of the first node.

    Loading ends before the training begins, so the node needs the larger of the two sums.
    """
    fullest = parts_at_peak(parts)
    training = ranks_per_node * sum(part.cpu for part in fullest if not part.while_loading)
    while_loading = 0.0
    for part in parts:
        if part.while_loading or part.from_start:
            while_loading += part.cpu * (1 if part.by_one_rank else ranks_per_node)
    return sum(part.gpu for part in fullest), max(training, while_loading)


def parts_at_peak(parts: list[MemoryPart]) -> list[MemoryPart]:
    """Return the parts with their bytes in the intervals in which GPU memory and CPU memory peak.

    The two intervals may differ. A part that exists in neither of them is left out.
    """
    on_gpu, on_cpu = (max(sums, key=sums.__getitem__) for sums in sums_by_interval(parts))
    found = []
    for part in parts:
        gpu = part.gpu if on_gpu in part.intervals else 0
        cpu = part.cpu if on_cpu in part.intervals else 0
        if gpu or cpu or part.intervals == INTERVALS:
            found.append(replace(part, gpu=gpu, cpu=cpu))
    return found


def sums_by_interval(parts: list[MemoryPart]) -> tuple[dict[str, float], dict[str, float]]:
    """Add up the bytes of one rank on the GPU and on the CPU, for each interval of a step."""
    training = [part for part in parts if not part.while_loading]
    on_gpu = {interval: sum(part.gpu for part in training if interval in part.intervals) for interval in INTERVALS}
    on_cpu = {interval: sum(part.cpu for part in training if interval in part.intervals) for interval in INTERVALS}
    return on_gpu, on_cpu
