"""Rehearse a training run as rank 0 of many ranks, in one process without GPUs. Report the rank's memory and messages.

    python benchmarks/rehearse.py --model_name tiny-bloom --gpus 8
    python benchmarks/rehearse.py --model_name bigscience/bloom-560m --gpus 64 --nodes 8 --fsdp
    python benchmarks/rehearse.py --model_name bigscience/bloom-7b1 --gpus 512 --nodes 64 \\
        --fsdp --fsdp_config fsdp_configs/hybrid_shard.json
    python benchmarks/rehearse.py --model_name custom-gpt --tensor_parallel 8 --fsdp --gpus 64 --nodes 8

The script takes the flags and variables of train.py and runs the same code: the Trainer, DDP, DeepSpeed, FSDP2 or
tensor parallelism, and the optimizer. Only the network and the values of the tensors are missing. The report shows the
predictions of estimate_memory.py next to the rehearsal's counts. tests/integration/test_rehearse.py checks that the
two agree.
"""

import os
import sys
import time
from collections import Counter

from harness import SCRIPTS

sys.path.insert(0, str(SCRIPTS))
from shared.before_imports import prepare_imports

prepare_imports()  # must come before the other imports, because PyTorch reads variables when it is imported

from distributed.strategy import choose_strategy
from estimate.command_line import check_optimizer, parse_plan
from estimate.communication import Ring, rings
from estimate.flags import RankFlags
from estimate.memory import estimate_parts, parts_at_peak
from estimate.model_shape import trace_shape, tracing_errors
from rehearsal.fake_training import check_rehearsal, rehearse
from rehearsal.observer import ACTIVATIONS, KINDS, ObservedStep
from rehearsal.read_collective import SMALL
from settings.settings import Settings
from shared.errors import run_program
from shared.units import MB, MIB


def report(settings: Settings) -> str:
    """Rehearse the training, and return a report that compares the counts with the formulas."""
    started = time.monotonic()
    with tracing_errors(settings):
        found = rehearse(settings)
    given = settings.estimate
    trainer = settings.trainer
    batch = f"{trainer.gradient_accumulation_steps} micro batch(es) of {trainer.per_device_train_batch_size}"
    strategy = choose_strategy(settings, given.gpus).name.replace("plain", "DDP")
    lines = [
        f"{settings.model.model_name}: {strategy}, {settings.precision}, {batch} x {settings.data.max_length} tokens "
        f"per rank, rank 0 of {given.gpus} on {given.nodes} node(s)",
        *(["fp16 is rehearsed as bf16, which has the same size"] if settings.precision == "fp16" else []),
        *memory_table(settings, found),
        f"peak: in the phase {found.peak_operation}",
        *collectives_table(settings, found),
        *sent_table(settings, found),
        "Not counted: CUDA context, NCCL, fragmentation.",
        f"Rehearsed in {time.monotonic() - started:.0f} s.",
    ]
    return "\n".join(lines)


def memory_table(settings: Settings, found: ObservedStep) -> list[str]:
    """Return a row for each kind of memory: size at the rehearsal's peak, largest size, and estimated size."""
    estimated = dict.fromkeys(KINDS, 0.0)
    for part in parts_at_peak(estimate_parts(settings)):
        estimated[part.name if part.name in KINDS else ACTIVATIONS] += part.gpu
    lines = [f"{'MiB':20}{'at the peak':>12}{'at most':>12}{'estimated':>12}"]
    for kind in KINDS:
        sizes = (found.at_peak[kind], found.at_most[kind], estimated[kind])
        lines.append(f"{kind:20}" + "".join(f"{size / MIB:12,.2f}" for size in sizes))
    return [*lines, f"{'sum':20}{found.at_peak.total() / MIB:12,.2f}{'':12}{sum(estimated.values()) / MIB:12,.2f}"]


def collectives_table(settings: Settings, found: ObservedStep) -> list[str]:
    """Return a row for each phase and kind of collective, in the order of their first occurrence."""
    number: Counter[tuple[str, str, str, str]] = Counter()
    size: Counter[tuple[str, str, str, str]] = Counter()
    for phase, each in found.collectives:
        if each.size >= SMALL:
            key = (phase, each.kind, each.dtype, group_name(settings, len(each.ranks), each.ranks[-1]))
            number[key] += 1
            size[key] += each.size
    small = len(found.collectives) - number.total()
    lines = [f"{'collectives of a step':26}{'dtype':10}{'ranks':21}{'number':>7}{'MB of larger tensor':>22}"]
    for key, times in number.items():
        phase, kind, dtype, group = key
        lines.append(f"{phase:10}{kind:16}{dtype:10}{group:21}{times:7}{size[key] / MB:22,.2f}")
    return [*lines, f"and {small} of less than {SMALL} bytes"]


def sent_table(settings: Settings, found: ObservedStep) -> list[str]:
    """Return a row for each kind of ring: the bytes that a rank sends as rehearsed, as estimated, and between nodes."""
    given = settings.estimate
    rehearsed = sent_by_group(found.rings())
    estimated = sent_by_group(rings(trace_shape(settings), settings))
    lines = [f"{'MB that a rank sends in a step':32}{'rehearsed':>12}{'estimated':>12}{'between nodes':>15}"]
    for ranks, distance in sorted(rehearsed | estimated):
        sizes = (rehearsed[ranks, distance], estimated[ranks, distance])
        if max(sizes) < SMALL:
            continue
        # Invert Ring.sent_bytes
        ring = Ring(ranks, distance, sizes[0] * ranks / max(ranks - 1, 1))
        between_nodes = ring.bytes_between_nodes(given.gpus, given.gpus // given.nodes)
        group = group_name(settings, ranks, (ranks - 1) * distance)
        lines.append(
            f"{group:32}" + "{:12,.2f}{:12,.2f}{:15,.2f}".format(*(size / MB for size in (*sizes, between_nodes)))
        )
    return lines


def sent_by_group(found: list[Ring]) -> Counter[tuple[int, int]]:
    """Add up the bytes that a rank sends in rings with the same number of ranks and the same distance between ranks."""
    sent: Counter[tuple[int, int]] = Counter()
    for ring in found:
        sent[ring.ranks, ring.distance] += ring.sent_bytes  # a mean, not an int
    return sent


def group_name(settings: Settings, ranks: int, last: int) -> str:
    """Describe the group of rank 0 by its size and the number of its last rank."""
    per_node = settings.estimate.gpus // settings.estimate.nodes
    return f"{ranks} on several nodes" if last >= per_node else f"{ranks} in a node"


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a rehearsal uses no GPU
    settings = parse_plan(description=__doc__, flags=RankFlags)
    check_optimizer(settings)
    check_rehearsal(settings)
    print(report(settings))


if __name__ == "__main__":
    run_program(main)
