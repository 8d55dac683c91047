"""The items that run.py measures, in groups: tables of names, variables and flags."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

from gpu_check import FULL  # noqa: E402
from shared.paths import SAMPLE  # noqa: E402

# 1,190 real questions of SQuAD v1.1, if they are there (CONTRIBUTING.md); otherwise the bundled sample
XQUAD = REPOSITORY.parent / "shared" / "data" / "xquad.en.json"
# run.py makes the model in its results folder, in which all items run: bloom-560m with random weights
MODEL = {"MODEL_NAME": "./model", "FROM_SCRATCH": "False", "TOKENIZER_NAME": "./model"}
QUESTIONS = {"DATASET": str(XQUAD if XQUAD.exists() else SAMPLE), "TRAIN_SIZE": "256"}

FP32 = {"FP16": "False"}  # the default on a GPU is fp16
BF16 = {"BF16": "True"}
SDPA = {"ATTENTION": "sdpa"}
CHUNKED = {"LOSS": "chunked"}
LONGEST = {"PADDING": "longest"}
NONE = {"PADDING": "none"}
AT_ONCE = {"BATCH_SIZE": "16", "GRAD_ACC": "1"}
AT_ONCE_64 = {"BATCH_SIZE": "64", "GRAD_ACC": "1"}
ALL = BF16 | SDPA | NONE | CHUNKED | AT_ONCE  # as in experiments/efficiency/all
LORA = {"LORA_RANK": "8", "LEARNING_RATE": "1e-2"}
AT_ONCE_4 = {"BATCH_SIZE": "4", "GRAD_ACC": "4"}
BATCHES = {4: ALL | AT_ONCE_4, 16: ALL, 64: ALL | AT_ONCE_64}
FIXED = {"ACCELERATE_DYNAMO_USE_DYNAMIC": "False"}  # a graph for each length; by default the second makes it a symbol
WHOLE = {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "0"}  # one graph of all blocks; by default a block is compiled
SMOLLM2 = {  # sizes of SmolLM2, a Llama with RoPE; run.py writes these folders
    "smollm2-360m": {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15}
    | {"num_key_value_heads": 5},
    "smollm2-1.7b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24}
    | {"num_attention_heads": 32, "num_key_value_heads": 32},
}


def zero(name: str) -> str:
    return f"--deepspeed ds_configs/{name}.json"


def fsdp(name: str) -> str:
    return f"--fsdp --fsdp_config fsdp_configs/{name}.json"


@dataclass(frozen=True)
class Item:
    """A program to run and measure.

    variables, flags: those of the program. steps: optimizer steps; 0: as many as the variables say. guard: seconds
    until the item is killed on a GPU. gpu_only: skip it with --cpu.
    """

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    flags: str = ""
    steps: int = 0
    guard: int = 120
    gpu_only: bool = False
    program: str = "scripts/train.py"


def full(name: str, variables: dict[str, str], flags: str = "", steps: int = 20, **more: Any) -> Item:
    """An item that trains bloom-560m for some steps, without evaluation."""
    return Item(name, FULL | MODEL | QUESTIONS | variables, f"--eval_strategy no {flags}", steps, **more)


def compiled(batch: int, mode: str = "default", how: str = "regional", lengths: str = "fixed") -> Item:
    name = f"compiled-{batch}-{mode}-{how}-{lengths}"
    variables = BATCHES[batch] | (WHOLE if how == "whole" else {}) | (FIXED if lengths == "fixed" else {})
    return full(name, variables, f"--torch_compile --torch_compile_mode {mode}", guard=90, gpu_only=True)


def pair(batch: int, again: str = "") -> list[Item]:
    """Rows as in version 2.0.0, and rows that are rounded up."""
    after = full(f"after-{batch}{again}", BATCHES[batch], guard=45)
    return [replace(after, name=f"before-{batch}{again}", program="benchmarks/gpu/exact_rows.py"), after]


def llama(name: str, batch: int) -> Item:
    variables = BATCHES[batch] | {"MODEL_NAME": f"./{name}", "FROM_SCRATCH": "True"}
    return full(f"{name}-{batch}", variables, guard=60)


def ranks(*rows: str, guard: int = 75) -> Item:
    """Rows of `gpu_check.py --ranks 4`, which launch.py starts. They share a folder, and so the losses of one rank."""
    flags = f"--ranks 4 --output ranks --timeout {guard} --rows {' '.join(rows)}"
    return Item(f"ranks-{rows[0]}", flags=flags, guard=guard, program="scripts/gpu_check.py")


GROUPS = {
    # What may bring 64 at once from 19 to 35 % of the peak, and 4 at once away from the CPU's limit. The first four
    # minutes decide most: the lengths, the compiled blocks, CUDA graphs, and weights in 16-bit precision
    "fast2": [
        *pair(64),
        *pair(4),
        *pair(16),
        compiled(64),
        compiled(4, "reduce-overhead"),
        full("zero1-64", BATCHES[64], zero("zero1"), guard=60),
        full("zero1-16", BATCHES[16], zero("zero1"), guard=60),
        *pair(64, "-again"),
        *pair(4, "-again"),
        compiled(16),
        compiled(64, lengths="symbolic"),
        compiled(4),
        compiled(16, "reduce-overhead"),
        compiled(64, "max-autotune-no-cudagraphs"),
        Item("micro-one_row", flags="one_row", program="benchmarks/gpu/micro.py", guard=90),
        Item("micro-weights", flags="weights", program="benchmarks/gpu/micro.py", guard=45),
        full("zero1-4", BATCHES[4], zero("zero1"), guard=60),
        full("zero0-64", BATCHES[64], zero("zero0"), guard=60),
        llama("smollm2-360m", 64),
        llama("smollm2-360m", 4),
        llama("smollm2-1.7b", 64),
        compiled(16, "max-autotune-no-cudagraphs"),
        compiled(4, "max-autotune-no-cudagraphs"),
        compiled(64, "reduce-overhead"),
        *(
            compiled(batch, mode, "whole")
            for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs")
            for batch in (64, 16, 4)
        ),
    ],
    # What no GPU has seen with four ranks. Each run also compares losses and copies of the weights between ranks, and
    # `stop` resumes its counts
    "ranks": [
        ranks("one_rank"),
        ranks("one_rank_gpt", "one_rank_padding_none", "one_rank_long", guard=120),
        ranks("tensor_parallel"),
        ranks("padding_none_full_shard"),
        ranks("padding_none_zero3"),
        ranks("full_shard"),
        ranks("stop", guard=120),
        ranks("ds_zero3_offload"),
    ],
    # The knobs of docs/efficiency.md, one after the other
    "fast": [
        full("recipe", FP32, steps=12),
        full("dynamic_padding", FP32 | LONGEST, steps=12),
        full("attention", FP32 | LONGEST | SDPA, steps=12),
        full("no_padding", FP32 | NONE | SDPA, steps=12),
        full("bf16", BF16 | NONE | SDPA),
        full("chunked_loss", BF16 | NONE | SDPA | CHUNKED),
        full("all", ALL, steps=30),
        full("all-again", ALL, steps=30),  # the spread of two runs of one row
        full("all-64", ALL | AT_ONCE_64),
        full("all-longest", ALL | LONGEST, steps=30),
        full("all-longest-64", ALL | LONGEST | AT_ONCE_64),
        full("all-full_loss", ALL | {"LOSS": "full"}),
        full("all-full_loss-64", ALL | {"LOSS": "full"} | AT_ONCE_64),
        full("all-fp16", SDPA | NONE | CHUNKED | AT_ONCE),
        full("all-lora", ALL | LORA),
        full("all-checkpointed", ALL, "--activation_checkpointing"),
        full("all-compiled", ALL, "--torch_compile", gpu_only=True),
        full("all-longest-compiled", ALL | LONGEST, "--torch_compile", gpu_only=True),
        full("all-custom-gpt", BF16 | NONE | CHUNKED | AT_ONCE | {"MODEL_NAME": "custom-gpt"}, gpu_only=True),
        full("baseline-fp16", {}),
    ],
    "profiles": [
        full("profile-all", ALL, "--profile", steps=10),
        full("profile-all-longest", ALL | LONGEST, "--profile", steps=10),
        full("profile-baseline-fp16", {}, "--profile", steps=10),
    ],
    "micro": [
        Item(f"micro-{name}", flags=name, program="benchmarks/gpu/micro.py")
        for name in ("ceilings", "losses", "attention", "gelu")
    ]
    + [Item("micro-energy", flags="energy", program="benchmarks/gpu/micro.py", gpu_only=True, guard=60)],
    "offload": [
        *(
            full(f"560m-{name}", {}, zero(name), steps=8)
            for name in ("zero2_cpu_offload", "zero2_cpu_offload_pinned_memory", "ds_zero3_offload")
        ),
        full("560m-full_shard_cpu_offload", {}, fsdp("full_shard_cpu_offload"), steps=8, gpu_only=True),
    ],
}
ITEMS = [item for group in GROUPS.values() for item in group]
