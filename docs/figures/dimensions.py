"""Compute the numbers of docs/dimensions.md, pipeline.md and long-texts.md: memory and messages of each dimension.

python docs/figures/dimensions.py

The example is a step of 32 questions of 512 tokens with bloom-7b1 in bf16, on 8 GPUs that are all used for one
dimension. The model state is that of scripts/estimate_memory.py. The bytes sent along data and shard are those of
scripts/estimate_memory.py. Nothing in scripts/ runs Megatron-LM's tensor parallelism, pipeline or context parallelism:
their messages follow from the definition of the method, with 16-bit activations. tests/unit/test_docs.py compares them
with a paper, a count or arithmetic by hand.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from estimate.command_line import parse_plan
from estimate.communication import sent_bytes
from estimate.memory import parts_at_peak, state_parts
from estimate.model_shape import FP32, HALF, Shape, trace_shape
from models.chunked_loss import GPU_PIECES, chunk_bytes
from settings.settings import Settings
from shared.units import GB, GIB

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS = 8
QUESTIONS = 32
TOKENS = 512
VOCABULARY = 250_880
MODEL = ["--model_name", "bigscience/bloom-7b1", "--bf16", "--per_device_train_batch_size", 1]
SHARD = ["--fsdp", "--fsdp_config", REPOSITORY / "fsdp_configs" / "full_shard.json"]
STATE = ("parameters", "gradients", "optimizer state", "buffers")
WITHOUT_CASTS = ["--deepspeed", REPOSITORY / "ds_configs" / "zero1.json"]  # the weights are bf16 and need no casts
# A GPT as large as bloom-7b1, because transformers has no plan for tensor parallelism of BLOOM
AS_LARGE = ["--vocab_size", VOCABULARY, "--hidden_size", 4096, "--num_layers", 30, "--num_heads", 32, "--ff_dim", 16384]
LOGITS = 12  # bytes per score in the backward pass: log-softmax and two gradients of its size, in fp32


class Dimension(NamedTuple):
    """Numbers of one dimension.

    held: bytes of model state and buffers on the rank that holds most. sent: bytes that a rank sends in a step.
    """

    held: float
    sent: float


def plan(*flags: object) -> Settings:
    return parse_plan([str(flag) for flag in (*MODEL, *flags)], environment={})


def dimensions() -> dict[str, Dimension]:
    shape = trace_shape(plan())
    accumulation = ["--gradient_accumulation_steps", QUESTIONS // RANKS]
    data = plan("--gpus", RANKS, *accumulation)
    shard = plan("--gpus", RANKS, *accumulation, *SHARD)
    whole = state_bytes(plan())
    averaged = sent_bytes(shape, data)  # gradients, once in a step
    return {
        "data": Dimension(state_bytes(data), averaged),
        "shard": Dimension(state_bytes(shard), sent_bytes(shape, shard)),
        "tensor": Dimension(whole / RANKS, QUESTIONS * tensor_sends(shape)),
        "pipeline": Dimension(whole * largest_stage(shape) / shape.parameters, QUESTIONS * pipeline_sends(shape)),
        "context": Dimension(state_bytes(data), QUESTIONS * context_sends(shape, TOKENS) + averaged),
    }


def state_bytes(settings: Settings) -> float:
    parts = state_parts(trace_shape(settings), settings)
    return sum(part.gpu for part in parts_at_peak([part for part in parts if part.name in STATE]))


# These functions return the bytes that one of RANKS ranks sends for a micro batch of one question


def shard_sends(shape: Shape) -> float:
    """Bytes with FULL_SHARD, which gathers all parameters in the forward pass and the blocks in the backward pass."""
    return HALF * (shape.parameters + sum(shape.block_sizes)) * (RANKS - 1) / RANKS


def tensor_sends(shape: Shape) -> float:
    """Bytes with Megatron-LM, which has two all-reduces in the forward and two in the backward pass of each block.

    Two more all-reduces are outside the blocks: the embedding's output, and the gradient of the head's input. A ring
    sends the tensor of an all-reduce twice.
    """
    all_reduces = 4 * shape.layers + 2
    return all_reduces * 2 * TOKENS * shape.hidden * HALF * (RANKS - 1) / RANKS


def tensor_sends_by_plan() -> float:
    """Bytes with transformers' plan: q, k and v are separate; tensors between blocks are fp32; logits are gathered."""
    gpt = ["--model_name", "custom-gpt", *AS_LARGE, "--tensor_parallel", RANKS, "--max_length", TOKENS]
    return trace_shape(plan(*gpt)).exchanged * (RANKS - 1) / RANKS


def break_even(accumulation: int, tensor: float) -> float:
    """Return the number of tokens in a micro batch at which FULL_SHARD and tensor parallelism send equal bytes.

    accumulation: number of micro batches per reduction of the gradients in FULL_SHARD. tensor: bytes that tensor
    parallelism sends for TOKENS.
    """
    shape = trace_shape(plan())
    gradients = HALF * shape.parameters * (RANKS - 1) / RANKS
    return TOKENS * (shard_sends(shape) + gradients / accumulation) / (RANKS * tensor)


def pipeline_sends(shape: Shape) -> float:
    """Bytes of a middle stage: hidden states to the next stage, and their gradients to the previous stage."""
    return 2 * TOKENS * shape.hidden * HALF


def context_sends(shape: Shape, tokens: int, *, again: bool = False) -> float:
    """Bytes with a ring, which exercises/solution/ring.py counts.

    The forward pass sends keys and values RANKS - 1 times. The backward pass sends their gradients too, and these once
    more. again: True with activation checkpointing, which repeats the forward pass.
    """
    own_keys = tokens / RANKS * shape.hidden * HALF
    forward, backward = 2 * (RANKS - 1), 4 * RANKS - 2
    return shape.layers * own_keys * ((2 if again else 1) * forward + backward)


def ulysses_sends(shape: Shape, tokens: int) -> float:
    """Bytes with Ulysses and activation checkpointing, which runs the forward pass twice and the backward pass once.

    Each pass has an all-to-all for queries, keys, values and output, or for their gradients.
    """
    own_keys = tokens / RANKS * shape.hidden * HALF
    return shape.layers * own_keys * 3 * 4 * (RANKS - 1) / RANKS


# Pipeline stages


def largest_stage(shape: Shape) -> int:
    """Parameters of the first of RANKS stages, which has the embedding and the largest number of blocks."""
    embedding = max(shape.sizes)
    return embedding + -(-shape.layers // RANKS) * shape.block_sizes[0]


def kept_by_first_stage(micro_batches: int) -> float:
    """Bytes of activations of the first stage's blocks."""
    shape = trace_shape(plan(*WITHOUT_CASTS))
    return micro_batches * -(-shape.layers // RANKS) * shape.peaks["loss"].activations / shape.layers


def logits(tokens: int, bytes_of_score: int = LOGITS) -> int:
    """Bytes of the logits on the last stage, which has only the head.

    The stage keeps FP32 bytes per score, and needs LOGITS bytes per score in the backward pass.
    """
    return tokens * VOCABULARY * bytes_of_score


# A long question


def question_activations(tokens: int) -> float:
    """Bytes of activations of a question, with an attention kernel that needs no mask of tokens x tokens.

    The traced kernel has such a mask, so n tokens take f(n) = a n + b n^2 bytes. The mask cancels in
    4 f(n) - f(2 n) = 2 a n.
    """
    short, long = (
        trace_shape(plan(*WITHOUT_CASTS, "--attention", "sdpa", "--max_length", length)).peaks["loss"].activations
        for length in (512, 1024)
    )
    return (4 * short - long) / 2 / 512 * tokens


def checkpointed(tokens: int, bytes_of_input: int = HALF) -> float:
    """Bytes of activations with checkpointing: the inputs of all blocks, and the activations of one block."""
    shape = trace_shape(plan())
    return shape.layers * tokens * shape.hidden * bytes_of_input + question_activations(tokens) / shape.layers


def chunked_loss(tokens: int) -> float:
    """Bytes of the chunked loss: fp32 gradients of the hidden states and of the head, and one piece of logits."""
    hidden = trace_shape(plan()).hidden
    piece = chunk_bytes(tokens, torch.empty(VOCABULARY, hidden, device="meta"), torch.bfloat16, GPU_PIECES)
    return FP32 * (tokens + VOCABULARY) * hidden + piece


# Tables of the pages


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows))


def table_of_dimensions() -> str:
    rows = [[name, f"{found.held / GIB:.1f}", f"{found.sent / GB:.2f}"] for name, found in dimensions().items()]
    return table(["8 ranks along", "GiB that a rank holds", "GB that a rank sends in a step"], rows)


def table_of_messages() -> str:
    shape = trace_shape(plan())
    in_a_step = dimensions()
    rows = [
        [name, f"{size / 1e6:,.1f}", str(times), f"{in_a_step[dimension].sent / GB:.2f}"]
        for name, size, times, dimension in (
            ("pipeline, a stage in the middle", pipeline_sends(shape), QUESTIONS, "pipeline"),
            ("tensor parallelism", tensor_sends(shape), QUESTIONS, "tensor"),
            ("FULL_SHARD", shard_sends(shape), QUESTIONS // RANKS, "shard"),
        )
    ]
    return table(["8 ranks", "MB for a micro batch", "Micro batches of a rank", "GB in a step"], rows)


def table_of_lengths() -> str:
    shape = trace_shape(plan())
    rows = [
        [
            f"{tokens:,}",
            f"{question_activations(tokens) / GIB:.1f}",
            f"{checkpointed(tokens) / GIB:.1f}",
            f"{logits(tokens) / GIB:.1f}",
            f"{chunked_loss(tokens) / GIB:.1f}",
            f"{context_sends(shape, tokens, again=True) / GB:.1f}",
            f"{ulysses_sends(shape, tokens) / GB:.1f}",
        ]
        for tokens in (4096, 32768, 131072)
    ]
    held = [f"{name}, GiB" for name in ("Activations", "Checkpointed", "Full logits", "Chunked loss")]
    return table(["Tokens", *held, "A ring sends, GB", "Ulysses sends, GB"], rows)


if __name__ == "__main__":
    print(table_of_dimensions(), table_of_messages(), table_of_lengths(), sep="\n\n")
    for schedule, first, last in (
        ("GPipe", QUESTIONS, logits(QUESTIONS * TOKENS, FP32)),
        ("1F1B", RANKS, logits(TOKENS)),
    ):
        kept = kept_by_first_stage(first)
        print(f"{schedule} keeps {kept / GIB:.1f} GiB on the first stage, {last / GIB:.1f} on the last")
    print(f"transformers' plan sends {QUESTIONS * tensor_sends_by_plan() / GB:.2f} GB")
    for name, tensor in (("Megatron-LM", tensor_sends(trace_shape(plan()))), ("transformers", tensor_sends_by_plan())):
        tokens = ", ".join(f"{break_even(a, tensor):,.0f} with accumulation {a}" for a in (1, QUESTIONS // RANKS))
        print(f"Tokens of a micro batch with which FULL_SHARD sends as much as {name}: {tokens}")
