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

from distributed.ds_config import offloaded
from estimate.command_line import parse_memory_plan
from estimate.compare import comparison, gpu_memory, verdict
from estimate.memory import GIB, at_peak, estimate_parts, sums_by_moment, totals, without_gpu
from estimate.model_shape import Shape, trace_shape
from settings.settings import Settings
from shared.errors import run_program

CUDA_RESERVE = 2 * GIB  # per process, for the memory that CUDA and NCCL take of a node; not measured


def memory_table(settings: Settings) -> str:
    """A row for each part of the memory, and whether all of it fits."""
    trainer = settings.trainer
    given = settings.estimate
    parts = estimate_parts(settings)
    if trainer.use_cpu:
        parts = without_gpu(parts)
    shape = trace_shape(settings)
    ranks = f"{given.gpus} rank(s) without a GPU" if trainer.use_cpu else f"{given.gpus} GPU(s)"
    batch = f"{trainer.per_device_train_batch_size} x {settings.data.max_length} tokens"
    lines = [
        f"{settings.model.model_name}: {shape.model:,} parameters, {settings.precision}, micro batch {batch}, "
        f"{ranks} on {given.nodes} node(s)",
        f"{'GiB per rank':24}{'GPU':>8}{'CPU':>8}",
        *(f"{part.name:24}{part.gpu / GIB:8.2f}{part.cpu / GIB:8.2f}  {part.note}" for part in at_peak(parts)),
    ]
    on_gpu, on_node = totals(parts, given.gpus // given.nodes)
    lines.append(moments_of_step(sums_by_moment(parts)[1 if trainer.use_cpu else 0]))
    if trainer.use_cpu:
        return "\n".join([*lines, verdict("one node", on_node, given.cpu_memory)])
    lines += [
        verdict("one GPU", on_gpu, gpu_memory(settings)),
        verdict("one node", on_node, given.cpu_memory),
        slurm_request(on_node, given.gpus // given.nodes, given.cpu_memory),
        deepspeed_estimate(shape, settings),
        "Not counted: CUDA context, NCCL, fragmentation.",
    ]
    return "\n".join(filter(None, lines))


def moments_of_step(sums: dict[str, float]) -> str:
    """The line with the bytes of each moment; the rows above it are those of the fullest one."""
    shown = ", ".join(f"{moment} {size / GIB:.1f}" for moment, size in sums.items())
    return f"moments of a step, GiB: {shown}"


def slurm_request(on_node: float, ranks_per_node: int, cpu_memory: float | None) -> str:
    """The line with the value for sbatch --mem. on_node: bytes. cpu_memory: GiB of a node, if they are known."""
    asked = math.ceil((1.2 * on_node + ranks_per_node * CUDA_RESERVE) / GIB)
    reserve = f"a fifth more, and {CUDA_RESERVE / GIB:g} GiB for CUDA in each process"
    if cpu_memory and asked > cpu_memory:
        reserve += "; more than there is: take all of it"
    return f"for sbatch: --mem={asked}G ({reserve})"


def deepspeed_estimate(shape: Shape, settings: Settings) -> str:
    """The estimate of DeepSpeed's own estimator, for the model's state only. It knows stages 2 and 3."""
    zero = settings.zero
    if zero.get("stage") not in (2, 3):
        return ""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    size = (settings.estimate.gpus // settings.estimate.nodes, settings.estimate.nodes)
    cpu_offload = offloaded(zero, "optimizer")
    if zero["stage"] == 2:
        cpu, gpu = estimate_zero2_model_states_mem_needs(shape.parameters, *size, cpu_offload)
    else:
        cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
            shape.parameters, max(shape.sizes), *size, cpu_offload, offloaded(zero, "param")
        )
    return f"DeepSpeed's own estimator, model state only: {gpu / GIB:.2f} GiB per GPU, {cpu / GIB:.2f} GiB per node"


def main() -> None:
    settings = parse_memory_plan(description=__doc__)
    if settings.estimate.knobs:
        print("\n".join(settings.knob_lines()))
    print(comparison(settings) if settings.estimate.compare else memory_table(settings))


if __name__ == "__main__":
    run_program(main)
