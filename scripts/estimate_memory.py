"""Estimate the memory of a training run per GPU and per node, and the bytes that a rank sends, before it runs.

    python scripts/estimate_memory.py --gpus 2 --gpu_memory 32
    python scripts/estimate_memory.py --model_name bigscience/bloom-3b --deepspeed ds_configs/zero3.json --gpus 4
    python scripts/estimate_memory.py --model_name bigscience/bloom-7b1 --gpus 8 --nodes 2 --gpu_memory 32 \\
        --fsdp --fsdp_config fsdp_configs/hybrid_shard.json

Compare all configs:
    python scripts/estimate_memory.py --compare --model_name bigscience/bloom-3b --gpus 4 --gpu_memory 32

The script takes the flags and variables of train.py: replace the name of the script in your command. BLOOM and
custom-gpt need no download; for another model the script downloads its config.json. docs/memory.md explains the rows.
"""

import math

from shared.before_imports import prepare_imports

prepare_imports()  # must come before the other imports, because PyTorch reads variables when it is imported

from config import ALL, HUB_SIZES
from data_loader import cut_into_pieces, find_files, read_part, resolve_size
from distributed.collectives import ranks_per_gpu
from distributed.strategy import Degrees, choose_strategy
from estimate.command_line import parse_memory_plan
from estimate.communication import sent_bytes
from estimate.compare import comparison, gpu_memory, verdict
from estimate.memory import estimate_parts, move_to_cpu, parts_at_peak, sums_by_interval, totals
from estimate.model_shape import trace_shape
from model import load_tokenizer
from settings.settings import Settings
from shared.errors import run_program
from shared.units import GB, GIB
from tasks import task_of

CUDA_RESERVE = 2 * GIB  # node memory of CUDA and NCCL in each process; an allowance, not a measurement


def memory_table(settings: Settings) -> str:
    """Return a table with a row for each part of the memory, and lines that say whether all parts fit."""
    trainer = settings.trainer
    given = settings.estimate
    parts = estimate_parts(settings)
    if trainer.use_cpu:
        parts = move_to_cpu(parts)
    shape = trace_shape(settings)
    ranks = f"{given.gpus} rank(s) without a GPU" if trainer.use_cpu else f"{given.gpus} GPU(s)"
    batch = f"{trainer.per_device_train_batch_size} x {settings.data.max_length} tokens"
    parameters = f"{shape.model:,} parameters" + (f" ({shape.trainable:,} trained)" if shape.frozen else "")
    lines = [
        f"{settings.model.model_name}: {parameters}, {settings.precision}, micro batch {batch}, "
        f"{ranks} on {given.nodes} node(s)",
        f"{'GiB per rank':24}{'GPU':>8}{'CPU':>8}",
        *(f"{part.name:24}{part.gpu / GIB:8.2f}{part.cpu / GIB:8.2f}  {part.note}" for part in parts_at_peak(parts)),
    ]
    on_gpu, on_node = totals(parts, given.gpus // given.nodes)
    sums = sums_by_interval(parts)[1 if trainer.use_cpu else 0]  # the table's rows show the largest of them
    lines.append("intervals of a step, GiB: " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in sums.items()))
    if given.gpus > 1:
        lines.append(f"each rank sends {sent_bytes(shape, settings) / GB:.3g} GB per optimizer step")
    if trainer.use_cpu:
        return "\n".join([*lines, verdict("one node", on_node, given.cpu_memory)])
    lines += [
        verdict("one GPU" if ranks_per_gpu() == 1 else "a rank's part of a GPU", on_gpu, gpu_memory(settings)),
        verdict("one node", on_node, given.cpu_memory),
        slurm_request(on_node, given.gpus // given.nodes, given.cpu_memory),
        "Not counted: CUDA context, NCCL, fragmentation.",
    ]
    return "\n".join(filter(None, lines))


def slurm_request(on_node: float, ranks_per_node: int, cpu_memory: float | None) -> str:
    """Return the line with the value for sbatch --mem. on_node: bytes on one node. cpu_memory: its GiB or None."""
    asked = math.ceil((1.2 * on_node + ranks_per_node * CUDA_RESERVE) / GIB)
    reserve = f"a fifth more, and {CUDA_RESERVE / GIB:g} GiB for CUDA in each process"
    if cpu_memory and asked > cpu_memory:
        reserve += "; more than the node has: request all of it"
    return f"for sbatch: --mem={asked}G ({reserve})"


def batch_line(settings: Settings, degrees: Degrees) -> str:
    """Return the line with the global batch and the number of optimizer steps, if the latter is known."""
    trainer = settings.trainer
    micro_batch, accumulation = trainer.per_device_train_batch_size, trainer.gradient_accumulation_steps
    at_once = micro_batch * degrees.groups
    ranks = f"{degrees.groups} " + ("rank(s)" if degrees.tensor == 1 else "tensor group(s)")
    line = f"global batch: {at_once * accumulation} (micro batch {micro_batch} x accumulation {accumulation} x {ranks})"
    if trainer.max_steps > 0:
        return f"{line}, {trainer.max_steps} steps"
    questions = count_questions(settings)
    if questions is None:
        return line
    steps_per_epoch = math.ceil(math.ceil(questions / at_once) / accumulation)
    steps = math.ceil(trainer.num_train_epochs * steps_per_epoch)
    return f"{line}, {steps} steps for {trainer.num_train_epochs:g} epochs of {questions} questions"


def count_questions(settings: Settings) -> int | None:
    """Return the number of training questions, None for all questions of a dataset on the Hub.

    Raises WorkshopError (exit code 2) if a local file is missing, is damaged, or has too few questions.
    """
    data = settings.data
    requested = data.train_size
    if data.samples_per_gpu:
        requested = data.samples_per_gpu * settings.estimate.gpus
    if find_files(data.dataset):
        examples = read_part("train", data)
        rows = examples.rows
        if task_of(rows.column_names).pieces:
            rows = cut_into_pieces(examples, load_tokenizer(settings.model, data), data)
        return resolve_size("train", requested, len(rows), data.dataset)
    if requested == ALL:
        return None
    return HUB_SIZES["train"] if requested is None else int(requested)


def main() -> None:
    settings = parse_memory_plan(description=__doc__)
    if settings.estimate.knobs:
        strategy = choose_strategy(settings, settings.estimate.gpus)
        print("\n".join([*settings.knob_lines(), strategy.line, batch_line(settings, strategy.degrees)]))
    print(comparison(settings) if settings.estimate.compare else memory_table(settings))


if __name__ == "__main__":
    run_program(main)
