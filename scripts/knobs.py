"""Every knob of the workshop: its variable, its flag and its default, which stands here and nowhere else.

    python scripts/knobs.py      # VARIABLE --flag default, a line each; job.sh reads the first word

Precedence: flag, then variable, then default. Only the standard library is imported here, so that a dry run need not
wait for PyTorch. docs/knobs.md explains the knobs; the flags' help stands below, beside their types.
"""

import argparse
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from errors import OneLineErrors, run_program


class Knob(NamedTuple):
    variable: str
    flag: str
    default: object  # None: decided later, by config.py, train.py or the library


KNOBS = (
    Knob("MODEL_NAME", "model_name", "bigscience/bloom-560m"),
    Knob("FROM_SCRATCH", "from_scratch", False),
    Knob("DATASET", "dataset", "squad"),
    Knob("EVAL_DATASET", "eval_dataset", None),
    Knob("TRAIN_SIZE", "train_size", 500),
    Knob("EVAL_SIZE", "eval_size", 100),
    Knob("SAMPLES_PER_GPU", "samples_per_gpu", None),
    Knob("MAX_LENGTH", "max_length", 512),
    Knob("PADDING", "padding", "max_length"),
    Knob("SAMPLING", "train_sampling_strategy", "random"),
    Knob("DATA_WORKERS", "dataloader_num_workers", 0),
    Knob("LABELS", "labels", "sequence"),
    Knob("LOSS", "loss", "full"),
    Knob("EM_F1", "em_f1", True),
    Knob("EM_F1_BATCH_SIZE", "em_f1_batch_size", 16),
    Knob("PROFILE", "profile", False),
    Knob("NUM_EPOCHS", "num_train_epochs", 3),
    Knob("BATCH_SIZE", "per_device_train_batch_size", 4),
    Knob("GRAD_ACC", "gradient_accumulation_steps", 4),
    Knob("LEARNING_RATE", "learning_rate", 5e-5),
    Knob("WEIGHT_DECAY", "weight_decay", 0.01),
    Knob("FP16", "fp16", None),
    Knob("BF16", "bf16", None),
    Knob("ACTIVATION_CHECKPOINTING", "activation_checkpointing", None),
    Knob("TENSOR_PARALLEL", "tensor_parallel", 1),
    Knob("TORCH_COMPILE", "torch_compile", False),
    Knob("SAVE_STRATEGY", "save_strategy", "epoch"),
    Knob("OUTPUT_DIR", "output_dir", None),
    Knob("EXPERIMENT_NAME", "run_name", None),
    Knob("REPORT_TO", "report_to", "none"),
    Knob("HANG_TIMEOUT", "ddp_timeout", 1800),
    Knob("TOKENIZER_NAME", "tokenizer_name", None),
    # custom-gpt only
    Knob("VOCAB_SIZE", "vocab_size", 50000),
    Knob("HIDDEN_SIZE", "hidden_size", 2048),
    Knob("NUM_LAYERS", "num_layers", 3),
    Knob("NUM_HEADS", "num_heads", 16),
    Knob("FF_DIM", "ff_dim", 8192),
    Knob("SEQ_LENGTH", "seq_length", 512),
)
CUSTOM_GPT = "custom-gpt"  # the --model_name of custom_model.py
DEFAULTS: dict[str, Any] = {knob.flag: knob.default for knob in KNOBS}
CUSTOM_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "ff_dim", "seq_length")
# Defaults that differ from transformers' own and have no variable
OTHER_DEFAULTS = {
    "eval_strategy": "epoch",
    "save_total_limit": 1,
    "logging_steps": 5,
    "logging_nan_inf_filter": False,  # it makes each micro batch wait for the GPU: WorkshopTrainer.training_step
    "ddp_find_unused_parameters": False,  # transformers' default searches the graph in each step
    "per_device_eval_batch_size": None,  # the training batch size
    "disable_tqdm": False,
}


def flag_field(flag: str, help_text: str) -> Any:
    """A dataclass field of this flag, whose default is that of the table."""
    return field(default=DEFAULTS[flag], metadata={"help": help_text})


@dataclass
class ModelArguments:
    """Flags of the model. (A knob whose flag transformers.TrainingArguments has, as NUM_EPOCHS, has no field.)"""

    model_name: str = flag_field(
        "model_name", "Hub name or local folder of a causal LM, tiny-bloom (no network needed) or custom-gpt."
    )
    from_scratch: bool = flag_field(
        "from_scratch", "Random weights in the named architecture: measures memory and speed without a download."
    )
    tokenizer_name: str | None = flag_field(
        "tokenizer_name", "Hub name or local folder of another tokenizer than the model's own."
    )
    loss: Literal["full", "chunked"] = flag_field(
        "loss", "From the logits of all tokens, or chunk by chunk without them (same loss, less memory, faster)."
    )
    tensor_parallel: int = flag_field(
        "tensor_parallel", "Ranks over which each matrix is cut; with --fsdp the others hold shards."
    )
    vocab_size: int = flag_field("vocab_size", "custom-gpt: tokens of the embedding and of the head.")
    hidden_size: int = flag_field("hidden_size", "custom-gpt: width. First to lower when memory runs out.")
    num_layers: int = flag_field("num_layers", "custom-gpt: transformer blocks.")
    num_heads: int = flag_field("num_heads", "custom-gpt: attention heads, a divisor of --hidden_size.")
    ff_dim: int = flag_field("ff_dim", "custom-gpt: width inside the feed-forward layers.")
    seq_length: int = flag_field("seq_length", "custom-gpt: positions, at least --max_length.")


@dataclass
class DataArguments:
    """Flags of the data, and of what is done with it besides the training."""

    dataset: str = flag_field("dataset", "Hub name, or a local SQuAD v1.1 or v2.0 JSON file.")
    eval_dataset: str | None = flag_field(
        "eval_dataset",
        "Local JSON file to evaluate on. Without it a local --dataset holds out every fifth paragraph.",
    )
    train_size: int = flag_field("train_size", "Number of training questions.")
    eval_size: int = flag_field("eval_size", "Number of evaluation questions.")
    samples_per_gpu: int | None = flag_field(
        "samples_per_gpu", "Weak scaling: train on this many questions per rank, instead of --train_size."
    )
    max_length: int = flag_field("max_length", "Longest sequence in tokens. First to lower when memory runs out.")
    padding: Literal["max_length", "longest"] = flag_field(
        "padding", "Pad every batch to --max_length, or only to its longest sequence (faster, same loss)."
    )
    labels: Literal["sequence", "answer", "all"] = flag_field(
        "labels", "Tokens that count in the loss: all real ones, only answer and EOS, or padding as well."
    )
    em_f1: bool = flag_field("em_f1", "After training, answer the evaluation questions and print EM and F1.")
    em_f1_batch_size: int = flag_field("em_f1_batch_size", "Questions that a rank answers at the same time.")
    profile: bool = flag_field("profile", "Write a trace of three steps per rank, and where the time of a step goes.")


# Variables and flags that are not what they seem, each with what to do instead

# Most of them from the workshop's original documents (docs/original-documents.md)
UNREAD_VARIABLES = {
    "PER_DEVICE_BATCH_SIZE": "use BATCH_SIZE",
    "GRAD_ACC_STEPS": "use GRAD_ACC",
    "LR": "use LEARNING_RATE",
    "LOG_DIR": "unset it; logs stand in the experiment's folder, below log/",
    "CONDA_SH_PATH": "unset it; the environment stands in site_setup of the site file",
    "CONDA_ENV": "unset it; the environment stands in site_setup of the site file",
}
# ps shows a flag to everybody on the node, and the run record keeps it
SECRET = "set the variable HF_TOKEN, or log in with hf auth login; a flag is no place for a secret"
# Flags of transformers 4 that version 5 removed and tutorials still use, with what takes their place
REMOVED_FLAGS = {
    "adafactor": "use --optim adafactor",
    "evaluation_strategy": "use --eval_strategy",
    "fsdp_min_num_params": 'set "min_num_params" in the --fsdp_config file',
    "fsdp_transformer_layer_cls_to_wrap": 'set "transformer_layer_cls_to_wrap" in the --fsdp_config file',
    "group_by_length": "use --train_sampling_strategy group_by_length",
    "half_precision_backend": "leave it out, there is one backend",
    "logging_dir": "set the variable TENSORBOARD_LOGGING_DIR",
    "no_cuda": "use --use_cpu",
    "overwrite_output_dir": "use a new --output_dir, or --resume_from_checkpoint to go on",
    "per_gpu_eval_batch_size": "use --per_device_eval_batch_size",
    "per_gpu_train_batch_size": "use --per_device_train_batch_size",
    "push_to_hub_model_id": "upload the saved folder afterwards",
    "push_to_hub_token": SECRET,
    "save_safetensors": "leave it out, safetensors is the only format",
    "use_mps_device": "leave it out, the device is found by itself",
    "warmup_ratio": "use --warmup_steps with a fraction below 1",
}
# Flags of TrainingArguments that would be accepted here and then have no effect
UNUSED_FLAGS = {
    "do_eval": "use --eval_strategy",
    "do_predict": "use scripts/evaluate.py",
    "do_train": "leave it out, training is what train.py does",
    "hub_model_id": "upload the saved folder afterwards",
    "hub_token": SECRET,
    "push_to_hub": "upload the saved folder afterwards",
}


def main() -> None:
    OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for each in KNOBS:
        print(each.variable, f"--{each.flag}", "" if each.default is None else each.default)


if __name__ == "__main__":
    run_program(main)
