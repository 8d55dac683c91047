"""The knobs of a training run: the variable, flag, default and help text of each.

    python scripts/config.py      # prints a line "VARIABLE --flag default" per knob

If you change a default here, it applies to each run in which no flag and no variable of the submission, the site or
the experiment sets the knob. Each run prints the source of each value. docs/knobs.md explains the knobs, and
scripts/settings reads and checks them. This file imports only the standard library, because many programs
should not wait for the import of PyTorch.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

CUSTOM_GPT = "custom-gpt"  # the --model_name of custom_model.py
TINY_BLOOM = "tiny-bloom"
ALL = "all"  # a value of --train_size and --eval_size
IGNORED = -100  # PyTorch's label for a token that does not count in the loss
# Sizes for a dataset of the Hub if none are given, as in the original documents. A local file is used whole
HUB_SIZES = {"train": 500, "eval": 100}


def has_random_weights(model_name: str, from_scratch: bool) -> bool:
    """Return whether the model starts untrained. Exact Match and F1 of its answers then stay at 0 for a long time."""
    return from_scratch or model_name in (TINY_BLOOM, CUSTOM_GPT)


def number_or_all(text: str) -> int | str:
    """Read a number of questions, or `all`. Raise ArgumentTypeError for any other text."""
    if text == ALL:
        return ALL
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}, expected a whole number or {ALL}") from None


def knob(variable: str, default: Any, description: str, parse: Callable[[str], Any] | None = None) -> Any:
    """Define a flag of this workshop. The field gives its name and type; None is a default that is computed later.

    parse: function that reads a value from text, if the field's type cannot.
    """
    return field(default=default, metadata={"variable": variable, "help": description, "parse": parse})


@dataclass(frozen=True)
class ModelArguments:
    """The model."""

    model_name: str = knob(
        "MODEL_NAME",
        "bigscience/bloom-560m",
        "Hub name or local folder of a causal LM; or tiny-bloom, which needs no network; or custom-gpt.",
    )
    from_scratch: bool = knob(
        "FROM_SCRATCH",
        False,
        "Start the named architecture with random weights, to measure memory and speed without a download.",
    )
    tokenizer_name: str | None = knob(
        "TOKENIZER_NAME", None, "Hub name or local folder of a tokenizer to use instead of the model's own."
    )
    loss: Literal["full", "chunked"] = knob(
        "LOSS",
        "full",
        "full: compute the logits of all tokens at once; chunked: in chunks (same loss, less memory, faster on a CPU).",
    )
    attention: Literal["eager", "sdpa"] | None = knob(
        "ATTENTION",
        None,
        "eager: step by step; sdpa: PyTorch's fused kernel (same loss, less memory). Default: the model's own.",
    )
    tensor_parallel: int = knob(
        "TENSOR_PARALLEL",
        1,
        "Number of ranks over which each matrix is cut; with --fsdp, the cut matrices are also sharded.",
    )
    lora_rank: int = knob(
        "LORA_RANK",
        0,
        "LoRA: freeze the model, and train adapters of this rank on its linear layers. 0: train all weights.",
    )
    save_merged: bool = knob(
        "SAVE_MERGED",
        True,
        "After LoRA, save the model with the adapters added to its weights. False: save only the adapters, for PEFT.",
    )
    # Sizes of custom-gpt; other models ignore them
    vocab_size: int = knob("VOCAB_SIZE", 50000, "custom-gpt: number of tokens in the vocabulary.")
    hidden_size: int = knob("HIDDEN_SIZE", 2048, "custom-gpt: width. Lower it first if memory runs out.")
    num_layers: int = knob("NUM_LAYERS", 3, "custom-gpt: number of transformer blocks.")
    num_heads: int = knob("NUM_HEADS", 16, "custom-gpt: number of attention heads, a divisor of --hidden_size.")
    ff_dim: int = knob("FF_DIM", 8192, "custom-gpt: width inside the feed-forward layers.")
    seq_length: int = knob("SEQ_LENGTH", 512, "custom-gpt: number of positions, at least --max_length.")


CUSTOM_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "ff_dim", "seq_length")


@dataclass(frozen=True)
class DataArguments:
    """The data, the evaluation and the profile."""

    dataset: str = knob(
        "DATASET", "squad", "Hub name; local files (SQuAD, CSV, TSV, JSON, TXT), separated by commas; or a folder."
    )
    eval_dataset: str | None = knob(
        "EVAL_DATASET",
        None,
        "Local file to evaluate on. Without it a local --dataset holds out every fifth passage, row or document.",
    )
    table_columns: str | None = knob(
        "TABLE_COLUMNS",
        None,
        "Columns to read: context, question, answers; prompt, completion; messages; or text. Default: the usual names.",
    )
    bad_rows: Literal["error", "skip"] = knob(
        "BAD_ROWS", "error", "Rows of a local file that cannot be used. error: list them and end; skip: leave them out."
    )
    answers: Literal["in_context", "free"] = knob(
        "ANSWERS", "in_context", "Answers about a passage. in_context: each is a part of its passage; free: any text."
    )
    train_size: int | str | None = knob(
        "TRAIN_SIZE",
        None,
        f"Number of training questions, or all. Default: all of a local file, {HUB_SIZES['train']} of the Hub.",
        parse=number_or_all,
    )
    eval_size: int | str | None = knob(
        "EVAL_SIZE",
        None,
        f"Number of evaluation questions, or all. Default: all of a local file, {HUB_SIZES['eval']} of the Hub.",
        parse=number_or_all,
    )
    samples_per_gpu: int | None = knob(
        "SAMPLES_PER_GPU", None, "Weak scaling: train on this many questions per rank, instead of --train_size."
    )
    max_length: int = knob("MAX_LENGTH", 512, "Longest sequence in tokens. Lower it first if memory runs out.")
    padding: Literal["max_length", "longest", "none"] = knob(
        "PADDING",
        "max_length",
        "Pad to --max_length, or to the longest sequence of the batch, or not at all (least memory; --attention sdpa).",
    )
    labels: Literal["sequence", "answer", "all"] | None = knob(
        "LABELS",
        None,
        "Tokens that count in the loss. sequence: all real tokens (default for passages and texts); answer: only the "
        "answer and EOS (default for completions and chats); all: also padding.",
    )
    em_f1: bool | None = knob(
        "EM_F1",
        None,
        "After training, answer the evaluation questions and print EM and F1. Default: only for passages.",
    )
    em_f1_batch_size: int = knob("EM_F1_BATCH_SIZE", 16, "Number of questions that a rank answers at the same time.")
    show: int = knob(
        "SHOW", 0, "After training, print this many evaluation questions with the right and the model's answer."
    )
    profile: bool = knob("PROFILE", False, "Trace three steps on each rank, and print the time of each part of a step.")


class Knob(NamedTuple):
    variable: str
    flag: str
    default: object  # None: computed later
    meaning: str


# Flags of transformers.TrainingArguments, which defines their types and help texts (python scripts/train.py --help).
# The meanings are short texts for docs/knobs.md
TRAINER_KNOBS = (
    Knob("NUM_EPOCHS", "num_train_epochs", 3, "Number of times that each training question is used."),
    Knob("BATCH_SIZE", "per_device_train_batch_size", 4, "Questions of a micro batch of one rank."),
    Knob("GRAD_ACC", "gradient_accumulation_steps", 4, "Micro batches of a rank in one optimizer step."),
    Knob("LEARNING_RATE", "learning_rate", 5e-5, "Learning rate at the start; it falls linearly to 0."),
    Knob("WEIGHT_DECAY", "weight_decay", 0.01, "Weight decay of AdamW."),
    Knob("FP16", "fp16", None, "Compute in fp16. Default: True on a GPU, unless bf16 is given."),
    Knob("BF16", "bf16", None, "Compute in bf16. Default: True on a CPU that supports bf16."),
    Knob("ACTIVATION_CHECKPOINTING", "activation_checkpointing", None, "Compute activations twice, do not keep them."),
    Knob("TORCH_COMPILE", "torch_compile", False, "Compile the model with torch.compile."),
    Knob("DATA_WORKERS", "dataloader_num_workers", 0, "Processes that make batches in advance."),
    Knob("SAVE_STRATEGY", "save_strategy", "epoch", "When to save a checkpoint: epoch, steps or no."),
    Knob("OUTPUT_DIR", "output_dir", None, "Folder of the model. Default: output/<job id>."),
    Knob("EXPERIMENT_NAME", "run_name", None, "Name of the run. Default: the name of the current folder."),
    Knob("REPORT_TO", "report_to", "none", "Tracker that gets the metrics, such as wandb."),
    Knob("HANG_TIMEOUT", "ddp_timeout", 1800, "Seconds without progress after which a rank that hangs ends the job."),
)
# Flags without a variable whose default differs from that of transformers
OTHER_DEFAULTS = {
    "eval_strategy": "epoch",
    "save_total_limit": 1,
    "logging_steps": 5,
    "logging_nan_inf_filter": False,  # True would wait for the GPU in each micro batch
    "ddp_find_unused_parameters": False,  # the default of transformers searches the graph in each step
    "per_device_eval_batch_size": None,  # None: per_device_train_batch_size
    "disable_tqdm": False,
}
# Defaults of transformers on which the workshop relies. A record has these flags only if they were given
DEFAULTS_OF_TRANSFORMERS: dict[str, Any] = {
    "optim": "adamw_torch_fused",
    "max_steps": -1,  # the number of steps follows from num_train_epochs
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "seed": 42,
}

OWN_KNOBS = [
    Knob(each.metadata["variable"], each.name, each.default, each.metadata["help"])
    for each in (*fields(ModelArguments), *fields(DataArguments))
]
KNOBS = (*OWN_KNOBS, *TRAINER_KNOBS)
DEFAULTS: dict[str, Any] = {each.flag: each.default for each in KNOBS}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for each in KNOBS:
        print(each.variable, f"--{each.flag}", "" if each.default is None else each.default)


if __name__ == "__main__":
    main()
