"""The knobs of a training run: the variable, flag, default and help text of each.

    python scripts/config.py      # prints a line "VARIABLE --flag default" per knob

A default counts only if nothing else sets the knob: no flag, and no variable of the submission, the site or the
experiment. Each run prints the source of each value. docs/knobs.md explains the knobs, and scripts/settings reads and
checks them. This file does not import PyTorch or pydantic, because many programs should not wait for them.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from shared.numbers import ABOVE_ZERO, Limits

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


Changes = Literal["training", "work", "nothing"]
OF_TRANSFORMERS: Final = object()  # no default here: the one of transformers counts
NOT_NEGATIVE: Final = Limits()
COUNT: Final = Limits(at_least=1)
POSITIVE: Final = Limits(at_least=ABOVE_ZERO)


@dataclass(frozen=True)
class Knob:
    """A flag with all its facts. A flag of transformers without a row below has the default facts of this class.

    variable: the environment variable, empty for a flag that is no knob. default: None if it is computed later.
    meaning: a short text for docs/knobs.md and the help.

    changes: what another value changes. training: the losses, so a run that resumes must have the checkpoint's value
    and the rows of a table must have equal values. work: the time or memory of the same training, or its number of
    steps, so only the rows of a table must have equal values. nothing: only what is printed, or where results are.

    compared_as: what the report compares instead of this flag. only_for: the only --model_name that has this
    knob. parse: reads a value from text, if the field's type cannot.
    """

    variable: str
    flag: str
    default: Any = OF_TRANSFORMERS
    meaning: str = ""
    changes: Changes = "training"
    limits: Limits = NOT_NEGATIVE
    compared_as: Literal["", "data size", "optimizer", "precision", "strategy"] = ""
    only_for: str = ""
    parse: Callable[[str], Any] | None = None


def knob(variable: str, default: Any, meaning: str, changes: Changes = "training", **facts: Any) -> Any:
    """Define a flag of this workshop. The field gives its name and type. facts: other attributes of `Knob`."""
    return field(
        default=default, metadata={"help": meaning, "knob": Knob(variable, "", default, meaning, changes, **facts)}
    )


def custom_size(variable: str, default: int, meaning: str) -> Any:
    """Define a size of custom-gpt, which other models do not have."""
    return knob(variable, default, f"{CUSTOM_GPT}: {meaning}", limits=COUNT, only_for=CUSTOM_GPT)


def knobs_of(arguments: Any) -> dict[str, Knob]:
    """Return flag -> knob for the fields of a dataclass."""
    return {each.name: replace(each.metadata["knob"], flag=each.name) for each in fields(arguments)}


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
        limits=COUNT,
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
        "nothing",
    )
    vocab_size: int = custom_size("VOCAB_SIZE", 50000, "number of tokens in the vocabulary.")
    hidden_size: int = custom_size("HIDDEN_SIZE", 2048, "width. Lower it first if memory runs out.")
    num_layers: int = custom_size("NUM_LAYERS", 3, "number of transformer blocks.")
    num_heads: int = custom_size("NUM_HEADS", 16, "number of attention heads, a divisor of --hidden_size.")
    ff_dim: int = custom_size("FF_DIM", 8192, "width inside the feed-forward layers.")
    seq_length: int = custom_size("SEQ_LENGTH", 512, "number of positions, at least --max_length.")


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
        limits=COUNT,
        compared_as="data size",
        parse=number_or_all,
    )
    eval_size: int | str | None = knob(
        "EVAL_SIZE",
        None,
        f"Number of evaluation questions, or all. Default: all of a local file, {HUB_SIZES['eval']} of the Hub.",
        limits=COUNT,
        parse=number_or_all,
    )
    samples_per_gpu: int | None = knob(
        "SAMPLES_PER_GPU",
        None,
        "Weak scaling: train on this many questions per rank, instead of --train_size.",
        limits=COUNT,
        compared_as="data size",
    )
    max_length: int = knob(
        "MAX_LENGTH", 512, "Longest sequence in tokens. Lower it first if memory runs out.", limits=COUNT
    )
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
        "work",
    )
    em_f1_batch_size: int = knob(
        "EM_F1_BATCH_SIZE", 16, "Number of questions that a rank answers at the same time.", "work", limits=COUNT
    )
    show: int = knob(
        "SHOW",
        0,
        "After training, print this many evaluation questions with the right and the model's answer.",
        "nothing",
    )
    profile: bool = knob(
        "PROFILE", False, "Trace three steps on each rank, and print the time of each part of a step.", "work"
    )


# Flags of transformers.TrainingArguments, which defines their types and help texts (python scripts/train.py --help). A
# variable turns a flag into a knob
TRAINER_FLAGS = (
    Knob("NUM_EPOCHS", "num_train_epochs", 3, "Number of times that each question is used.", "work", POSITIVE),
    Knob("BATCH_SIZE", "per_device_train_batch_size", 4, "Questions of a micro batch of one rank.", "work", COUNT),
    Knob("GRAD_ACC", "gradient_accumulation_steps", 4, "Micro batches of a rank in one optimizer step.", "work", COUNT),
    Knob(
        "LEARNING_RATE", "learning_rate", 5e-5, "Learning rate at the start; it falls linearly to 0.", limits=POSITIVE
    ),
    Knob("WEIGHT_DECAY", "weight_decay", 0.01, "Weight decay of the optimizer."),
    Knob(
        "FP16", "fp16", None, "Compute in fp16. Default: True on a GPU, unless bf16 is given.", compared_as="precision"
    ),
    Knob("BF16", "bf16", None, "Compute in bf16. Default: True on a CPU that supports bf16.", compared_as="precision"),
    Knob("ACTIVATION_CHECKPOINTING", "activation_checkpointing", None, "Compute activations twice, do not keep them."),
    Knob("TORCH_COMPILE", "torch_compile", False, "Compile the model with torch.compile."),
    Knob("DATA_WORKERS", "dataloader_num_workers", 0, "Processes that make batches in advance.", "work"),
    Knob("SAVE_STRATEGY", "save_strategy", "epoch", "When to save a checkpoint: epoch, steps or no.", "work"),
    Knob("OUTPUT_DIR", "output_dir", None, "Folder of the model. Default: output/<job id>.", "nothing"),
    Knob("EXPERIMENT_NAME", "run_name", None, "Name of the run. Default: the name of the current folder.", "nothing"),
    Knob("REPORT_TO", "report_to", "none", "Tracker that gets the metrics, such as wandb.", "nothing"),
    Knob(
        "HANG_TIMEOUT",
        "ddp_timeout",
        1800,
        "Seconds without progress after which a rank that hangs ends the job.",
        "nothing",
        Limits(1, below=10**9),
    ),
    # Without a variable, but with a default on which the workshop relies. A checkpoint or a
    # record from before a row was added ran with the default of the row
    Knob("", "optim", "adamw_torch_fused", compared_as="optimizer"),
    Knob("", "max_steps", -1, changes="work", limits=Limits(1, besides=-1)),  # -1: num_train_epochs counts
    Knob("", "lr_scheduler_type", "linear"),
    Knob("", "max_grad_norm", 1.0),
    Knob("", "seed", 42, limits=Limits(below=2**32)),
    Knob("", "dataloader_drop_last", False),
    Knob("", "eval_strategy", "epoch", changes="work"),
    Knob("", "save_total_limit", 1, changes="nothing", limits=Limits(at_least=-(10**9))),  # 0 or less: no limit
    Knob("", "logging_steps", 5, changes="nothing", limits=POSITIVE),  # *_steps below 1 are a fraction of the training
    Knob("", "logging_nan_inf_filter", False, changes="work"),  # True would wait for the GPU in each micro batch
    Knob("", "ddp_find_unused_parameters", False, changes="work"),  # True would search the graph in each step
    Knob("", "per_device_eval_batch_size", None, changes="work", limits=COUNT),  # None: per_device_train_batch_size
    Knob("", "disable_tqdm", False, changes="nothing"),
    # Without a variable, and with the default of transformers
    *(Knob("", flag, changes="work", compared_as="strategy") for flag in ("deepspeed", "fsdp", "fsdp_config")),
    *(Knob("", flag, changes="work", limits=POSITIVE) for flag in ("eval_steps", "save_steps")),
    *(Knob("", flag, limits=Limits(below=1)) for flag in ("adam_beta1", "adam_beta2")),
    Knob("", "data_seed", limits=Limits(below=2**32)),
    Knob("", "eval_accumulation_steps", changes="work", limits=COUNT),
    Knob("", "local_rank", changes="nothing", limits=Limits(at_least=-1)),
    Knob("", "resume_from_checkpoint", changes="nothing"),
    *(
        Knob("", flag, changes="work")
        for flag in (
            *("eval_delay", "eval_do_concat_batches", "eval_on_start", "eval_use_gather_object", "use_cpu"),
            *("dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_persistent_workers"),
            *("dataloader_pin_memory", "dataloader_prefetch_factor", "log_level", "log_level_replica"),
            *("log_on_each_node", "logging_first_step", "logging_strategy", "save_on_each_node", "save_only_model"),
        )
    ),
)

FLAGS = knobs_of(ModelArguments) | knobs_of(DataArguments) | {each.flag: each for each in TRAINER_FLAGS}
KNOBS = tuple(each for each in FLAGS.values() if each.variable)
DEFAULTS: dict[str, Any] = {flag: each.default for flag, each in FLAGS.items() if each.default is not OF_TRANSFORMERS}
CUSTOM_SIZES = tuple(each.flag for each in KNOBS if each.only_for == CUSTOM_GPT)


def facts(flag: str) -> Knob:
    """Return the facts of any flag. A flag without a row counts as one that changes the training."""
    return FLAGS.get(flag, Knob("", flag))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for each in KNOBS:
        print(each.variable, f"--{each.flag}", "" if each.default is None else each.default)


if __name__ == "__main__":
    main()
