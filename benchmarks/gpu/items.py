"""The items that run.py measures, in groups: tables of names, variables, flags and ranks."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

from gpu_check import FULL, TINY  # noqa: E402
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
FOUR_EPOCHS = {"NUM_EPOCHS": "4"}  # 32 steps, so that a stop comes before the end on a fast GPU too
LORA = {"LORA_RANK": "8", "LEARNING_RATE": "1e-2"}
GPT = {"MODEL_NAME": "custom-gpt", "VOCAB_SIZE": "1024", "HIDDEN_SIZE": "64", "NUM_HEADS": "4", "FF_DIM": "128"}
GPT |= {"SAVE_STRATEGY": "no"}  # tensor parallelism cannot save checkpoints


def zero(name: str) -> str:
    return f"--deepspeed ds_configs/{name}.json"


def fsdp(name: str) -> str:
    return f"--fsdp --fsdp_config fsdp_configs/{name}.json"


@dataclass(frozen=True)
class Item:
    """A program to run and measure.

    variables, flags: those of the program. steps: optimizer steps; 0: as many as the variables say. ranks: processes
    that share the GPU. equal_to: the item with the same evaluation loss. resume: stop the run, resume it, and
    compare it with a run that was not stopped. guard: seconds until the item is killed. gpu_only: skip it with --cpu.
    """

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    flags: str = ""
    steps: int = 0
    ranks: int = 1
    equal_to: str = ""
    resume: bool = False
    guard: int = 120
    gpu_only: bool = False
    program: str = "scripts/train.py"


def full(name: str, variables: dict[str, str], flags: str = "", steps: int = 20, **more: Any) -> Item:
    """An item that trains bloom-560m for some steps, without evaluation."""
    return Item(name, FULL | MODEL | QUESTIONS | variables, f"--eval_strategy no {flags}", steps, **more)


def tiny(name: str, variables: dict[str, str], flags: str = "", **more: Any) -> Item:
    """An item that trains tiny-bloom for two epochs of 8 steps and evaluates it."""
    return Item(name, TINY | variables, flags, **more)


def shared(
    name: str, flags: str = "", variables: dict[str, str] = FP32, equal_to: str = "one-rank", **more: Any
) -> Item:
    """An item that trains tiny-bloom with ranks that share the GPU, with the global batch of one rank: 8 questions."""
    ranks = int(name[0])
    batch = {"BATCH_SIZE": str(8 // ranks), "GRAD_ACC": "1"}
    return Item(name, TINY | batch | variables, flags, ranks=ranks, equal_to=equal_to, **more)


GROUPS = {
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
        Item(f"micro-{name}", flags=name, program="benchmarks/gpu/micro.py", gpu_only=name == "energy")
        for name in ("ceilings", "losses", "attention", "gelu", "energy")
    ],
    "offload": [
        *(
            full(f"560m-{name}", {}, zero(name), steps=8)
            for name in ("zero2_cpu_offload", "zero2_cpu_offload_pinned_memory", "ds_zero3_offload")
        ),
        full("560m-full_shard_cpu_offload", {}, fsdp("full_shard_cpu_offload"), steps=8, gpu_only=True),
    ],
    "resume": [
        tiny("resume-plain", FOUR_EPOCHS, resume=True),
        tiny("resume-zero2", FOUR_EPOCHS, zero("zero2"), resume=True),
        tiny("resume-full_shard", FOUR_EPOCHS, fsdp("full_shard"), resume=True),
    ],
    # Every strategy with ranks that share the GPU, in fp32, so that the losses must be equal
    "ranks": [
        *(Item(f"{ranks}r-probe", ranks=ranks, program="benchmarks/gpu/probe.py") for ranks in (2, 4)),
        tiny("one-rank", FP32),
        tiny("one-rank-lora", FP32 | LORA),
        tiny("one-rank-gpt", FP32 | GPT),
        tiny("one-rank-none", FP32 | CHUNKED | SDPA | NONE, equal_to="one-rank"),
        shared("2r-ddp"),
        *(shared(f"2r-{name}", zero(name)) for name in ("zero0", "zero1", "zero2", "zero3")),
        *(shared(f"2r-{name}", zero(name)) for name in ("zero1_cpu_offload", "zero2_cpu_offload")),
        *(shared(f"2r-{name}", zero(name)) for name in ("zero3_cpu_offload", "ds_zero3_offload")),
        *(shared(f"2r-{name}", fsdp(name)) for name in ("full_shard", "shard_grad_op")),
        shared("2r-full_shard_activation_checkpointing", fsdp("full_shard_activation_checkpointing")),
        *(shared(f"2r-{name}", fsdp(name), gpu_only=True) for name in ("fsdp1_full_shard", "full_shard_cpu_offload")),
        shared("2r-none-ddp", "", FP32 | CHUNKED | SDPA | NONE),
        shared("2r-none-zero3", zero("zero3"), FP32 | CHUNKED | SDPA | NONE),
        shared("2r-none-full_shard", fsdp("full_shard"), FP32 | CHUNKED | SDPA | NONE),
        shared("2r-lora-zero3", zero("zero3"), FP32 | LORA, "one-rank-lora"),
        shared("2r-lora-full_shard", fsdp("full_shard"), FP32 | LORA, "one-rank-lora"),
        # The ranks of a tensor-parallel group get the same questions, so the batch is that of one rank
        shared("2r-tensor_parallel", "--tensor_parallel 2", FP32 | GPT | {"BATCH_SIZE": "8"}, "one-rank-gpt"),
        shared("4r-ddp"),
        shared("4r-zero3", zero("zero3")),
        shared("4r-hybrid_shard_2x2", fsdp("hybrid_shard_2x2")),
        # bloom-560m on two ranks: the bytes that a rank holds, and its peak
        full("560m-2r-ddp", {}, steps=5, ranks=2),
        *(full(f"560m-2r-{name}", {}, zero(name), steps=5, ranks=2) for name in ("zero2", "zero3")),
        full("560m-2r-full_shard", {}, fsdp("full_shard"), steps=5, ranks=2),
    ],
}
ITEMS = [item for group in GROUPS.values() for item in group]
