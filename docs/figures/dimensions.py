"""Numbers of docs/dimensions.md and docs/pipeline.md: what a rank holds and sends along each dimension, for bloom-7b1.

PYTHONPATH=scripts python docs/figures/dimensions.py

A step of 32 questions of 512 tokens in bf16, on 8 GPUs that are all used for one dimension. State is that of
scripts/estimate_memory.py, bytes sent along data and shard are those of scripts/estimate_time.py. Tensor parallelism
sends what was counted for the custom GPT, in the blocks alone (benchmarks/communication.py). Pipeline and context
parallelism run nowhere in scripts/: their messages are what these methods pass on by definition.
"""

from pathlib import Path
from typing import NamedTuple

from estimate.memory import GIB, estimate
from estimate.model_shape import FP32, HALF, Shape, shape_for
from estimate.planned import options_of_plan
from estimate_time import GB, sent

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS = 8
QUESTIONS = 32
TOKENS = 512
MODEL = ["--model_name", "bigscience/bloom-7b1", "--bf16", "--per_device_train_batch_size", 1]
SHARD = ["--fsdp", "--fsdp_config", REPOSITORY / "fsdp_configs" / "full_shard.json"]
STATE = ("parameters", "gradients", "optimizer state", "buffers")
WITHOUT_CASTS = ["--deepspeed", REPOSITORY / "ds_configs" / "zero1.json"]  # weights are bf16, and not cast in a pass


class Dimension(NamedTuple):
    """held: bytes of the rank that holds most, without activations. sent: bytes in a step, by a rank."""

    held: float
    sent: float


def options(*flags: object):
    return options_of_plan([str(flag) for flag in (*MODEL, *flags)], "", environment={})


def dimensions() -> dict[str, Dimension]:
    shape = shape_for(options())
    accumulation = ["--gradient_accumulation_steps", QUESTIONS // RANKS]
    data = options("--gpus", RANKS, *accumulation)
    shard = options("--gpus", RANKS, *accumulation, *SHARD)
    whole = state_of(options())
    averaged = sent(shape, data)  # gradients, once in a step
    return {
        "data": Dimension(state_of(data), averaged),
        "shard": Dimension(state_of(shard), sent(shape, shard)),
        "tensor": Dimension(whole / RANKS, QUESTIONS * tensor_sends(shape)),
        "pipeline": Dimension(whole * largest_stage(shape) / shape.parameters, QUESTIONS * pipeline_sends(shape)),
        "context": Dimension(state_of(data), QUESTIONS * context_sends(shape, TOKENS) + averaged),
    }


def state_of(options) -> float:
    return sum(part.gpu for part in estimate(options) if part.what in STATE)


# Bytes that one of RANKS ranks sends for a micro batch of one question


def shard_sends(shape: Shape) -> float:
    """FULL_SHARD gathers all parameters forward, and those of the blocks once more backward."""
    return HALF * (shape.parameters + sum(shape.block_sizes)) * (RANKS - 1) / RANKS


def tensor_sends(shape: Shape) -> float:
    """Each block has two all-reduces forward, in 16 bit, and four backward, in fp32; a ring sends each twice."""
    of_a_token = shape.layers * 2 * (2 * HALF + 4 * FP32) * shape.hidden
    return TOKENS * of_a_token * (RANKS - 1) / RANKS


def break_even() -> float:
    """Tokens of a rank's micro batch with which FULL_SHARD sends what tensor parallelism does for all ranks' tokens."""
    shape = shape_for(options())
    return TOKENS * shard_sends(shape) / (RANKS * tensor_sends(shape))


def pipeline_sends(shape: Shape) -> float:
    """A stage in the middle: hidden states to the one, their gradients to the other."""
    return 2 * TOKENS * shape.hidden * HALF


def context_sends(shape: Shape, tokens: int) -> float:
    """Keys and values go round once forward; backward once more, with the gradients of both."""
    keys_and_values = 2 * tokens * shape.hidden * HALF
    return shape.layers * 3 * keys_and_values * (RANKS - 1) / RANKS


# Pipeline stages


def largest_stage(shape: Shape) -> int:
    """Parameters of the first of RANKS stages: the embedding, and as many blocks as any stage has."""
    embedding = max(shape.sizes)
    return embedding + -(-shape.layers // RANKS) * shape.block_sizes[0]


def activations_of_a_stage() -> float:
    """Bytes of one micro batch: the whole model's, divided evenly."""
    return shape_for(options(*WITHOUT_CASTS)).activations / RANKS


# A long question


def activations_of_a_question(tokens: int) -> float:
    """Bytes, in a kernel for attention that needs no mask of tokens x tokens, as ours here does.

    Of two lengths of which one is twice the other, four times the shorter one's less the longer one's has no square.
    """
    of_512, of_1024 = (
        shape_for(options(*WITHOUT_CASTS, "--attention", "sdpa", "--max_length", length)).activations
        for length in (512, 1024)
    )
    return (4 * of_512 - of_1024) / 2 / 512 * tokens


def checkpointed(tokens: int) -> float:
    """Bytes: the inputs of all blocks, and the activations of one."""
    shape = shape_for(options())
    return shape.layers * tokens * shape.hidden * HALF + activations_of_a_question(tokens) / shape.layers


# The tables of the pages


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows))


def table_of_dimensions() -> str:
    rows = [[name, f"{found.held / GIB:.1f}", f"{found.sent / GB:.2f}"] for name, found in dimensions().items()]
    return table(["8 ranks along", "GiB that a rank holds", "GB that a rank sends in a step"], rows)


def table_of_messages() -> str:
    shape = shape_for(options())
    in_a_step = dimensions()
    rows = [
        [name, f"{size / 1e6:,.1f}", str(times), f"{in_a_step[dimension].sent / GB:.2f}"]
        for name, size, times, dimension in (
            ("pipeline, a stage in the middle", pipeline_sends(shape), QUESTIONS, "pipeline"),
            ("tensor parallelism, in the blocks", tensor_sends(shape), QUESTIONS, "tensor"),
            ("FULL_SHARD", shard_sends(shape), QUESTIONS // RANKS, "shard"),
        )
    ]
    return table(["8 ranks", "MB for a micro batch", "Micro batches of a rank", "GB in a step"], rows)


def table_of_lengths() -> str:
    shape = shape_for(options())
    rows = [
        [
            f"{tokens:,}",
            f"{activations_of_a_question(tokens) / GIB:.1f}",
            f"{checkpointed(tokens) / GIB:.1f}",
            f"{checkpointed(tokens) / RANKS / GIB:.1f}",
            f"{context_sends(shape, tokens) / GB:.1f}",
        ]
        for tokens in (8192, 32768, 131072)
    ]
    heads = [
        "Tokens",
        "GiB of activations",
        "GiB, checkpointed",
        "the same, of each of 8 ranks",
        "GB that a rank sends",
    ]
    return table(heads, rows)


if __name__ == "__main__":
    print(table_of_dimensions(), table_of_messages(), table_of_lengths(), sep="\n\n")
    print(f"\nGiB of activations of one of {RANKS} stages, one micro batch: {activations_of_a_stage() / GIB:.2f}")
    print(f"Tokens of a micro batch from which on FULL_SHARD sends less than tensor parallelism: {break_even():,.0f}")
