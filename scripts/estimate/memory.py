"""Memory of a training on a GPU and on its node, part by part. docs/memory.md explains the parts."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache

import psutil

from distributed.ds_config import offloaded
from distributed.fsdp_config import fsdp_strategy
from estimate.model_shape import FP32, PASSES, Shape, recomputes_blocks, trace_shape, uses_autocast, weight_bytes
from settings.settings import Settings

MIB = 2**20
GIB = 2**30
K = 3 * FP32  # of the ZeRO paper: bytes per parameter of fp32 master, first and second moment of Adam
# Moments of an optimizer step. Its peak is in one of them
MOMENTS = (*PASSES, "step")
STEP = ("step",)
GRADIENTS_COMPLETE = ("embedding", "step")
PINNED_UNUSED = "pinned, unused"
ZERO_GRADIENTS = (  # of stages 0 to 3
    "whole",
    "whole until the last backward pass of a step",
    "the share, tensors on its edge whole",
    "the share",
)


@dataclass(frozen=True)
class MemoryPart:
    """A part of what one rank holds, in bytes of its GPU and of its node's memory.

    moments: when the rank holds it. while_loading: it exists only while weights are loaded, before the training.
    from_start: it exists while weights are loaded and in the training. by_one_rank: only one rank of the job holds it.
    """

    name: str
    gpu: float
    cpu: float = 0
    note: str = ""
    moments: tuple[str, ...] = MOMENTS
    while_loading: bool = False
    from_start: bool = False
    by_one_rank: bool = False


def estimate_parts(
    settings: Settings, config_json: str | None = None, python: MemoryPart | None = None
) -> list[MemoryPart]:
    """Parameters, gradients, optimizer state, buffers, activations, logits and Python of the rank that holds most.

    config_json: of the model, if it is not to be looked up. python: what was measured, if not in this process.
    Raises WorkshopError (exit code 2) for an unknown model.
    """
    shape = trace_shape(settings, config_json)
    return [*state_parts(shape, settings), *pass_parts(shape, settings), python or measure_python()]


def state_parts(shape: Shape, settings: Settings) -> list[MemoryPart]:
    """Parameters, gradients, optimizer state and buffers, and the weights while they are loaded."""
    compute_bytes = weight_bytes(settings)
    ranks = settings.estimate.gpus // settings.model.tensor_parallel
    accumulates = settings.trainer.gradient_accumulation_steps > 1
    if settings.deepspeed_config is not None:
        return deepspeed_parts(shape, settings.zero, ranks, accumulates, compute_bytes)
    if settings.fsdp_config is not None:
        # With tensor parallelism FSDP gathers fp32 weights, and autocast casts them for each operation
        gathered_bytes = FP32 if uses_autocast(settings) else compute_bytes
        return fsdp_parts(shape, settings.fsdp_config, accumulates, gathered_bytes)
    return unsharded_parts(shape, ranks, accumulates)


def pass_parts(shape: Shape, settings: Settings) -> list[MemoryPart]:
    """Bytes that the passes of a micro batch need beyond the model state, in each part of the passes."""
    kept = "kept for the backward pass"
    if recomputes_blocks(settings):
        kept = "checkpointed: inputs of the blocks, and one block's"
    loss, scores = "loss", "logits of a chunk"
    if settings.model.loss == "full":
        loss, scores = "logits", "at the peak as log-softmax and two gradients, in fp32"
    parts = []
    for moment, peak in shape.peaks.items():
        parts += [
            MemoryPart("activations", peak.activations, note=kept, moments=(moment,)),
            MemoryPart(loss, peak.logits, note=scores, moments=(moment,)),
            MemoryPart("head", peak.head, note="copies of its weight, and gradients on their way", moments=(moment,)),
        ]
    return [part for part in parts if part.gpu]


@cache
def measure_python() -> MemoryPart:
    """Measure this process once: it has imported nearly the same as a training."""
    own = psutil.Process().memory_info().rss
    return MemoryPart("Python, libraries", 0, own, "as this very process has it", from_start=True)


# 1. Trainer and DDP


def unsharded_parts(shape: Shape, ranks: int, accumulates: bool) -> list[MemoryPart]:
    """fp32 weights, gradients and moments, whole on every rank: 4 + 4 + 8 bytes for each of the Psi parameters.

    accumulates: whether a step has several backward passes. Then gradients exist from the first one on.
    """
    psi = shape.parameters
    if ranks > 1:
        buckets = MemoryPart("buffers", FP32 * psi, note="DDP's gradient buckets")
    else:
        buckets = MemoryPart("buffers", 0, note="no gradients to average")
    return [
        MemoryPart("parameters", FP32 * psi, note="fp32 weights"),
        MemoryPart("gradients", FP32 * psi, note="fp32", moments=MOMENTS if accumulates else GRADIENTS_COMPLETE),
        MemoryPart("optimizer state", 2 * FP32 * psi, note="two moments of Adam, fp32"),
        buckets,
        weights_while_loading(shape.model),
    ]


# 2. DeepSpeed ZeRO
#
# The symbols are those of the ZeRO paper (arXiv:1910.02054, sections 3.1 and 5): Psi parameters, N_d ranks, and the
# multiplier K = 12 of Adam's state in mixed precision. Without ZeRO a rank holds (2 + 2 + K) Psi bytes, of which
#     stage 1 leaves it   2 Psi + 2 Psi + K Psi / N_d              (P_os)
#     stage 2             2 Psi + (2 Psi + K Psi) / N_d            (P_os+g)
#     stage 3             (2 Psi + 2 Psi + K Psi) / N_d            (P_os+g+p)
# The 2 is compute_bytes below: in fp32 it is 4. Where DeepSpeed holds more than the paper, the comment says why.


def deepspeed_parts(shape: Shape, zero: dict, n_d: int, accumulates: bool, compute_bytes: int) -> list[MemoryPart]:
    """Parts of the memory under DeepSpeed. accumulates: whether a step has several backward passes."""
    psi = shape.parameters
    stage = zero.get("stage", 0)
    parameters: float = compute_bytes * psi
    gradients: float = compute_bytes * psi
    optimizer_state: float = K * psi
    if stage == 0 and compute_bytes == FP32:
        optimizer_state -= FP32 * psi  # fp32 weights are their own masters
    if stage >= 1:
        optimizer_state /= n_d
    if stage == 2:
        gradients = compute_bytes * max(map(sum, stage2_gradients(shape.sizes, n_d)))  # and what lies on its edges
    if stage == 3:
        gradients /= n_d
        parameters /= n_d
    on_cpu = offloaded(zero, "optimizer")
    state = "fp32 masters, two moments"
    if stage == 0 and compute_bytes == FP32:
        state = "two moments; the weights are their own masters"
    # Stage 3, and an offload, keep a buffer for gradients from the start
    exist = MOMENTS if accumulates or stage == 3 or on_cpu else GRADIENTS_COMPLETE
    parts = [
        MemoryPart(
            "parameters",
            *on_gpu_or_cpu(parameters, offloaded(zero, "param")),
            "the share" if stage == 3 else "whole",
            from_start=stage == 3,
        ),
        MemoryPart("gradients", *on_gpu_or_cpu(gradients, on_cpu and stage >= 2), ZERO_GRADIENTS[stage], exist),
        MemoryPart("optimizer state", *on_gpu_or_cpu(optimizer_state, on_cpu), state),
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
    """Temporary buffers (ZeRO paper, section 3.2), and the gathered parameters of stage 3."""
    psi = shape.parameters
    stage = zero.get("stage", 0)
    on_cpu = offloaded(zero, "optimizer")
    if stage == 0:
        # the 16-bit optimizer copies all gradients to fp32 for its step
        copies = 0 if compute_bytes == FP32 else FP32 * psi
        return [MemoryPart("buffers", copies, note="fp32 gradients", moments=STEP)]
    # Gradients are reduced in buckets, of the hidden size squared where the file says "auto"
    bucket = compute_bytes * min(zero_size(zero, "reduce_bucket_size", shape.hidden**2, 5e8), psi)
    # the optimizer steps on fp32 gradients of the rank's share: 4 Psi / N_d
    in_step = MemoryPart("buffers", *on_gpu_or_cpu(FP32 * psi / n_d, on_cpu), "fp32 gradients of the share", STEP)
    if stage == 3:
        # Parameters are gathered before they are used, up to a limit, and the next ones ahead. A rank that has all of
        # them on its GPU gathers nothing
        gathered = 0.0
        if n_d > 1 or offloaded(zero, "param"):
            live = min(psi, zero.get("stage3_max_live_parameters", 1e9))
            prefetch = zero_size(zero, "stage3_prefetch_bucket_size", 0.9 * shape.hidden**2, 5e7)
            gathered = compute_bytes * (live + prefetch)
        note = "bucket, parameters gathered at a time"
        return [MemoryPart("buffers", bucket + gathered, note=note, moments=PASSES), in_step]
    if on_cpu:
        # gradients pass to the CPU through a buffer for the largest one, on both sides, and the updated 16-bit share
        # comes back from a copy there
        largest = compute_bytes * max(shape.sizes)
        copy_of_share = compute_bytes * psi / n_d
        return [
            MemoryPart("buffers", bucket + largest, note="bucket, transfers", moments=PASSES),
            MemoryPart("buffers", 0, FP32 * psi / n_d + largest + copy_of_share, "fp32 gradients, transfers"),
        ]
    return [MemoryPart("buffers", bucket, note="bucket", moments=PASSES), in_step]


def stage2_gradients(sizes: tuple[int, ...], n_d: int) -> list[list[int]]:
    """Elements of each gradient that a rank keeps, for each rank: DeepSpeed cuts the row of all parameters into equal
    parts, and a gradient on the edge of two parts stays whole on both sides."""
    part = math.ceil(sum(sizes) / n_d)
    ends = list(itertools.accumulate(sizes))
    kept = []
    for rank in range(n_d):
        first = rank * part
        last = first + part
        kept.append([size for size, end in zip(sizes, ends, strict=True) if end > first and end - size < last])
    return kept


def pinned_blocks(shape: Shape, zero: dict, n_d: int, compute_bytes: int) -> list[float]:
    """Sizes of the buffers that DeepSpeed pins with offload_optimizer, offload_param or both, in bytes."""
    share = shape.parameters / n_d
    sizes = []
    if offloaded(zero, "param"):
        sizes.append(compute_bytes * share)  # whatever pin_memory says
    if not offloaded(zero, "optimizer") or not zero["offload_optimizer"].get("pin_memory", True):
        return sizes
    if zero.get("stage") == 3:
        sizes.append(compute_bytes * share)  # gradients
        group = zero.get("sub_group_size", 1e9)  # the fp32 gradients are cut into groups of so many
        whole_groups, rest = divmod(share, group)
        return [*sizes, *[FP32 * group] * int(whole_groups), FP32 * rest]
    sizes += [FP32 * share, FP32 * share]  # masters and their gradients
    sizes += [compute_bytes * share, compute_bytes * max(shape.sizes)]  # transfers: the share, the largest gradient
    if zero.get("stage") == 2:
        # each gradient is a block of its own; those of the first rank, which has the embedding, stand for all ranks
        sizes += [compute_bytes * size for size in stage2_gradients(shape.sizes, n_d)[0]]
    return sizes


def pinned_while_loading(shape: Shape, zero: dict, n_d: int, compute_bytes: int) -> float:
    """Bytes of pinned blocks that ZeRO-3 gave back after loading, and PyTorch keeps for a use that never comes."""
    if not offloaded(zero, "param") or not zero["offload_param"].get("pin_memory", True):
        return 0
    return sum(power_of_two(compute_bytes * size / n_d) for size in shape.sizes)


def zero_size(zero: dict, key: str, by_model: float, default: float) -> float:
    """Return a size. The Trainer replaces "auto" by the value for the model; a missing key has DeepSpeed's default."""
    value = zero.get(key, default)
    return by_model if value == "auto" else value


# 3. FSDP
#
# In the symbols of the FSDP paper (arXiv:2304.11277, section 3.2): Psi parameters over the sharding factor F, which is
# the world size for full sharding, and the ranks of a node for HYBRID_SHARD. Unlike ZeRO's, shares are fp32: 4 Psi / F
# of parameters, and what is gathered for a unit is in the precision of the computation.


def fsdp_parts(shape: Shape, config: dict, accumulates: bool, compute_bytes: int) -> list[MemoryPart]:
    """Parts of the memory under FSDP. accumulates: whether a step has several backward passes."""
    psi = shape.parameters
    f = config["dp_shard_size"]
    on_cpu = config.get("cpu_offload", False)
    padded = shape.padded(f)
    share = FP32 * padded.parameters / f  # 4 Psi / F
    if accumulates:
        # no reduce-scatter before the last backward pass of a step, so gradients stay whole
        gradients = MemoryPart("gradients", compute_bytes * psi, note="whole while gradients accumulate")
    else:
        gradients = MemoryPart("gradients", *on_gpu_or_cpu(share, on_cpu), "fp32 share", GRADIENTS_COMPLETE)
    parts = [
        MemoryPart("parameters", *on_gpu_or_cpu(share, on_cpu), "fp32 share", from_start=True),
        gradients,
        MemoryPart("optimizer state", *on_gpu_or_cpu(2 * share, on_cpu), "two moments of Adam, fp32 share"),
        *fsdp_buffers(padded, config, accumulates, compute_bytes),
        weights_while_loading(shape.model),
    ]
    if on_cpu:  # each parameter's share and its gradient are pinned on their own
        parts.append(pinned_rounding([FP32 * size / f for size in shape.sizes] * 2))
    return parts


def fsdp_buffers(shape: Shape, config: dict, accumulates: bool, compute_bytes: int) -> list[MemoryPart]:
    """Parameters gathered at a time, and gradients on their way, in the precision of the computation.

    Each block is a unit of FSDP, and so is an embedding that is not the head as well. The rest is the root unit, which
    stays gathered in both passes.
    """
    psi = shape.parameters
    f = config["dp_shard_size"]
    on_cpu = config.get("cpu_offload", False)
    block = max(shape.block_sizes, default=0)
    embedding = sum(shape.sizes[number] for number in shape.embedding)
    root = psi - sum(shape.block_sizes) - embedding
    by_block = config.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP") == "TRANSFORMER_BASED_WRAP"
    if not by_block or not shape.block_sizes:
        block, embedding, root = 0, 0, psi
    # A block in use, and the next one, which is gathered ahead
    gathered = {"loss": root, "blocks": root + 2 * block, "embedding": root + embedding}
    if f == 1 and not on_cpu:
        gathered = dict.fromkeys(PASSES, 0)  # this rank has all parameters where they are needed
    elif "SHARD_GRAD_OP" in fsdp_strategy(config):
        gathered = dict.fromkeys(PASSES, psi)
    # Gradients of a block, and their copy for the reduce-scatter. If embedding and head are one, the sum of their
    # gradients needs more than its reduce-scatter, and is counted in the passes
    reduced = {"loss": 0, "blocks": 2 * block, "embedding": embedding}
    # HYBRID_SHARD keeps the shares that it averages over the replicas until the backward pass ends
    averaged = psi / f if config.get("dp_replicate_size", 1) > 1 and not accumulates else 0
    parts = []
    for moment in PASSES:
        size = gathered[moment] + reduced[moment] + (averaged if moment != "loss" else 0)
        note = "parameters gathered at a time, gradients on their way"
        parts.append(MemoryPart("buffers", compute_bytes * size, note=note, moments=(moment,)))
    if on_cpu and accumulates:  # accumulated gradients lie on the GPU, their share of the step on the CPU
        parts.append(MemoryPart("buffers", 0, FP32 * psi / f, "fp32 gradients", STEP))
    return parts


# 4. The memory of a node


def weights_while_loading(psi: int, by_one_rank: bool = False) -> MemoryPart:
    note = "by rank 0 alone, as it hands out the shares" if by_one_rank else "before they move to the GPU"
    return MemoryPart("weights while loading", 0, FP32 * psi, note, while_loading=True, by_one_rank=by_one_rank)


def on_gpu_or_cpu(size: float, on_cpu: bool) -> tuple[float, float]:
    return (0, size) if on_cpu else (size, 0)


def pinned_rounding(pinned: list[float], kept: float = 0) -> MemoryPart:
    """Memory that pinned blocks take beyond their content: PyTorch's host allocator rounds up to powers of two."""
    extra = sum(power_of_two(size) - size for size in pinned if size > 0)
    return MemoryPart(PINNED_UNUSED, 0, extra + kept, "pinned blocks are rounded up to powers of two")


def power_of_two(size: float) -> int:
    return 1 << (math.ceil(size) - 1).bit_length()


def without_gpu(parts: list[MemoryPart]) -> list[MemoryPart]:
    """Move all parts to the CPU's memory, for a training without GPUs. Nothing is pinned there, or rounded up."""
    on_cpu = [replace(part, gpu=0, cpu=part.gpu + part.cpu) for part in parts]
    return [part for part in on_cpu if part.name != PINNED_UNUSED]


def totals(parts: list[MemoryPart], ranks_per_node: int) -> tuple[float, float]:
    """Bytes of the fullest GPU, and of the first node's memory.

    Loading and training do not overlap, so the node needs the larger of the two.
    """
    now = at_peak(parts)
    training = ranks_per_node * sum(part.cpu for part in now if not part.while_loading)
    while_loading = 0.0
    for part in parts:
        if part.while_loading or part.from_start:
            while_loading += part.cpu * (1 if part.by_one_rank else ranks_per_node)
    return sum(part.gpu for part in now), max(training, while_loading)


def at_peak(parts: list[MemoryPart]) -> list[MemoryPart]:
    """Return the parts with their bytes at the fullest moment of the GPU, and at that of the CPU.

    These may be two moments. A part of some moments only is left out if both have nothing of it.
    """
    on_gpu, on_cpu = (max(sums, key=sums.__getitem__) for sums in sums_by_moment(parts))
    found = []
    for part in parts:
        gpu = part.gpu if on_gpu in part.moments else 0
        cpu = part.cpu if on_cpu in part.moments else 0
        if gpu or cpu or part.moments == MOMENTS:
            found.append(replace(part, gpu=gpu, cpu=cpu))
    return found


def sums_by_moment(parts: list[MemoryPart]) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of a GPU and of the CPU in each moment of a step."""
    training = [part for part in parts if not part.while_loading]
    on_gpu = {moment: sum(part.gpu for part in training if moment in part.moments) for moment in MOMENTS}
    on_cpu = {moment: sum(part.cpu for part in training if moment in part.moments) for moment in MOMENTS}
    return on_gpu, on_cpu
