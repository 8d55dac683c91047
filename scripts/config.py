"""The configuration of a training: each knob once, with its variable, its flag, its default, and what it does.

    python scripts/config.py      # VARIABLE --flag default, a line each; job.sh reads the first word

A default that you change here counts for each run that is not told otherwise: by a flag, or by a variable of the
submission, of the site, or of the experiment. Each run prints which of them each value comes from. docs/knobs.md
explains the knobs; the folder settings reads and checks them. Only the standard library is imported here, so that
job.sh need not wait for PyTorch.
"""

import argparse
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

CUSTOM_GPT = "custom-gpt"  # the --model_name of custom_model.py
TINY_BLOOM = "tiny-bloom"


def has_random_weights(model_name: str, from_scratch: bool) -> bool:
    """Whether such a model begins untrained. Its answers are wrong for long: Exact Match and F1 stay at 0."""
    return from_scratch or model_name in (TINY_BLOOM, CUSTOM_GPT)


def knob(variable: str, default: Any, what: str) -> Any:
    """A flag of this workshop. The field has its name and type; None is a default that is found later."""
    return field(default=default, metadata={"variable": variable, "help": what})


@dataclass(frozen=True)
class ModelArguments:
    """The model."""

    model_name: str = knob(
        "MODEL_NAME",
        "bigscience/bloom-560m",
        "Hub name or local folder of a causal LM, tiny-bloom (no network needed) or custom-gpt.",
    )
    from_scratch: bool = knob(
        "FROM_SCRATCH",
        False,
        "Random weights in the named architecture: measures memory and speed without a download.",
    )
    tokenizer_name: str | None = knob(
        "TOKENIZER_NAME", None, "Hub name or local folder of another tokenizer than the model's own."
    )
    loss: Literal["full", "chunked"] = knob(
        "LOSS",
        "full",
        "full: from the logits of all tokens; chunked: without them, in chunks (same loss, less memory, faster).",
    )
    attention: Literal["eager", "sdpa"] | None = knob(
        "ATTENTION",
        None,
        "eager: step by step; sdpa: PyTorch's fused kernel (same loss, less memory). Default: the model's own.",
    )
    tensor_parallel: int = knob(
        "TENSOR_PARALLEL", 1, "Ranks over which each matrix is cut; with --fsdp the others hold shards."
    )
    # Of custom-gpt alone
    vocab_size: int = knob("VOCAB_SIZE", 50000, "custom-gpt: tokens of the embedding and of the head.")
    hidden_size: int = knob("HIDDEN_SIZE", 2048, "custom-gpt: width. First to lower when memory runs out.")
    num_layers: int = knob("NUM_LAYERS", 3, "custom-gpt: transformer blocks.")
    num_heads: int = knob("NUM_HEADS", 16, "custom-gpt: attention heads, a divisor of --hidden_size.")
    ff_dim: int = knob("FF_DIM", 8192, "custom-gpt: width inside the feed-forward layers.")
    seq_length: int = knob("SEQ_LENGTH", 512, "custom-gpt: positions, at least --max_length.")


CUSTOM_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "ff_dim", "seq_length")


@dataclass(frozen=True)
class DataArguments:
    """The data, and what is done with it besides the training."""

    dataset: str = knob("DATASET", "squad", "Hub name, or a local SQuAD v1.1 or v2.0 JSON file.")
    eval_dataset: str | None = knob(
        "EVAL_DATASET",
        None,
        "Local JSON file to evaluate on. Without it a local --dataset holds out every fifth paragraph.",
    )
    train_size: int = knob("TRAIN_SIZE", 500, "Number of training questions.")
    eval_size: int = knob("EVAL_SIZE", 100, "Number of evaluation questions.")
    samples_per_gpu: int | None = knob(
        "SAMPLES_PER_GPU", None, "Weak scaling: train on this many questions per rank, instead of --train_size."
    )
    max_length: int = knob("MAX_LENGTH", 512, "Longest sequence in tokens. First to lower when memory runs out.")
    padding: Literal["max_length", "longest"] = knob(
        "PADDING",
        "max_length",
        "max_length: pad to --max_length; longest: to the longest sequence of the batch (faster, same loss).",
    )
    labels: Literal["sequence", "answer", "all"] = knob(
        "LABELS",
        "sequence",
        "What counts in the loss. sequence: all real tokens; answer: only answer and EOS; all: padding as well.",
    )
    em_f1: bool = knob("EM_F1", True, "After training, answer the evaluation questions and print EM and F1.")
    em_f1_batch_size: int = knob("EM_F1_BATCH_SIZE", 16, "Questions that a rank answers at the same time.")
    profile: bool = knob("PROFILE", False, "Write a trace of three steps per rank, and where the time of a step goes.")


class Knob(NamedTuple):
    variable: str
    flag: str
    default: object


# Flags that transformers.TrainingArguments has, with its types and help (python scripts/train.py --help)
TRAINER_KNOBS = (
    Knob("NUM_EPOCHS", "num_train_epochs", 3),
    Knob("BATCH_SIZE", "per_device_train_batch_size", 4),
    Knob("GRAD_ACC", "gradient_accumulation_steps", 4),
    Knob("LEARNING_RATE", "learning_rate", 5e-5),
    Knob("WEIGHT_DECAY", "weight_decay", 0.01),
    Knob("FP16", "fp16", None),  # None: True on a GPU, unless bf16 is given
    Knob("BF16", "bf16", None),  # None: True on a CPU that computes in bf16
    Knob("ACTIVATION_CHECKPOINTING", "activation_checkpointing", None),
    Knob("TORCH_COMPILE", "torch_compile", False),
    Knob("SAMPLING", "train_sampling_strategy", "random"),
    Knob("DATA_WORKERS", "dataloader_num_workers", 0),
    Knob("SAVE_STRATEGY", "save_strategy", "epoch"),
    Knob("OUTPUT_DIR", "output_dir", None),  # output/<job id>
    Knob("EXPERIMENT_NAME", "run_name", None),  # name of the folder
    Knob("REPORT_TO", "report_to", "none"),
    Knob("HANG_TIMEOUT", "ddp_timeout", 1800),  # seconds
)
# Where the workshop has another default than transformers, and no variable
OTHER_DEFAULTS = {
    "eval_strategy": "epoch",
    "save_total_limit": 1,
    "logging_steps": 5,
    "logging_nan_inf_filter": False,  # it waits for the GPU in each micro batch; WorkshopTrainer does without
    "ddp_find_unused_parameters": False,  # transformers' default searches the graph in each step
    "per_device_eval_batch_size": None,  # the training batch size
    "disable_tqdm": False,
}

OWN_KNOBS = [Knob(f.metadata["variable"], f.name, f.default) for f in (*fields(ModelArguments), *fields(DataArguments))]
KNOBS = (*OWN_KNOBS, *TRAINER_KNOBS)
DEFAULTS: dict[str, Any] = {each.flag: each.default for each in KNOBS}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for each in KNOBS:
        print(each.variable, f"--{each.flag}", "" if each.default is None else each.default)


if __name__ == "__main__":
    main()
