"""Compute the table of docs/dimensions.md, "At the scale that nobody here has", and the numbers of at-scale.svg.

The bytes are those of scripts/estimate_memory.py, for a custom GPT with micro batch 4.
"""

from pathlib import Path
from typing import NamedTuple

from estimate.command_line import parse_plan
from estimate.communication import bytes_between_nodes, sent_bytes
from estimate.memory import MemoryPart, parts_at_peak, state_parts
from estimate.model_shape import trace_shape
from shared.units import GB, GIB

REPOSITORY = Path(__file__).resolve().parents[2]
GPUS = (8, 64, 512, 1024)
PER_NODE = 8
MODEL = ["--model_name", "custom-gpt", "--hidden_size", 4096, "--num_layers", 32, "--num_heads", 32]
MODEL += ["--ff_dim", 16384, "--vocab_size", 50000, "--bf16", "--gradient_accumulation_steps", 1]
FSDP = ["--fsdp", "--fsdp_config"]
METHODS = {
    "DDP": [],
    **{f"ZeRO-{stage}": ["--deepspeed", f"{REPOSITORY}/ds_configs/zero{stage}.json"] for stage in (1, 2, 3)},
    "FULL_SHARD": [*FSDP, f"{REPOSITORY}/fsdp_configs/full_shard.json"],
    "HYBRID_SHARD": [*FSDP, f"{REPOSITORY}/fsdp_configs/hybrid_shard.json"],
    f"TP {PER_NODE} x FSDP": ["--fsdp", "--tensor_parallel", PER_NODE],
}
STATE = ("parameters", "gradients", "optimizer state", "buffers")


class AtScale(NamedTuple):
    """Numbers of one method on one number of GPUs.

    held: model state and buffers at their peak, on the rank that holds most. inside_nodes, between_nodes: bytes that a
    rank sends in a step, as the mean of all ranks.
    """

    held: list[MemoryPart]
    inside_nodes: float
    between_nodes: float


def at_scale(method: str, gpus: int) -> AtScale:
    flags = [*METHODS[method], "--gpus", gpus, "--nodes", gpus // PER_NODE]
    if gpus == PER_NODE and "--tensor_parallel" in flags:
        flags.remove("--fsdp")  # all ranks are in one tensor group, so --fsdp would find no other group
    settings = parse_plan([str(flag) for flag in (*MODEL, *flags)], environment={})
    shape = trace_shape(settings)
    between_nodes = bytes_between_nodes(shape, settings)
    return AtScale(
        held=parts_at_peak([part for part in state_parts(shape, settings) if part.name in STATE]),
        inside_nodes=sent_bytes(shape, settings) - between_nodes,
        between_nodes=between_nodes,
    )


def page_table() -> str:
    """Return the table of docs/dimensions.md."""
    gpus = GPUS[-1]
    heads = ["GiB that a rank holds", "GB that a rank sends in a step", "GB of these that leave its node"]
    lines = [f"| On {gpus:,} GPUs | {' | '.join(heads)} |", "|" + " --- |" * 4]
    for method in METHODS:
        shown = at_scale(method, gpus)
        held = sum(part.gpu for part in shown.held) / GIB
        between = shown.between_nodes / GB
        sent_in_all = shown.inside_nodes / GB + between
        lines.append(f"| {method} | {held:.1f} | {sent_in_all:.1f} | {between:.1f} |")
    return "\n".join(lines)
