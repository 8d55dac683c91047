"""Flags of the workshop besides those of transformers.TrainingArguments. Their defaults are in config.KNOBS."""

from dataclasses import dataclass, field
from typing import Literal

CUSTOM_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "ff_dim", "seq_length")


@dataclass
class ModelArguments:
    model_name: str = field(
        default="bigscience/bloom-560m",
        metadata={"help": "Hub name or local folder of a causal LM, tiny-bloom (no network needed) or custom-gpt."},
    )
    from_scratch: bool = field(
        default=False,
        metadata={"help": "Random weights in the named architecture: measures memory and speed without a download."},
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Hub name or local folder of another tokenizer than the model's own."}
    )
    vocab_size: int = field(default=50000, metadata={"help": "custom-gpt: tokens of the embedding and of the head."})
    hidden_size: int = field(default=2048, metadata={"help": "custom-gpt: width. First to lower when memory runs out."})
    num_layers: int = field(default=3, metadata={"help": "custom-gpt: transformer blocks."})
    num_heads: int = field(default=16, metadata={"help": "custom-gpt: attention heads, a divisor of --hidden_size."})
    ff_dim: int = field(default=8192, metadata={"help": "custom-gpt: width inside the feed-forward layers."})
    seq_length: int = field(default=512, metadata={"help": "custom-gpt: positions, at least --max_length."})


@dataclass
class DataArguments:
    dataset: str = field(default="squad", metadata={"help": "Hub name, or a local SQuAD v1.1 or v2.0 JSON file."})
    eval_dataset: str | None = field(
        default=None,
        metadata={
            "help": "Local JSON file to evaluate on. Without it a local --dataset holds out every fifth paragraph."
        },
    )
    train_size: int = field(default=500, metadata={"help": "Number of training questions."})
    eval_size: int = field(default=100, metadata={"help": "Number of evaluation questions."})
    samples_per_gpu: int | None = field(
        default=None,
        metadata={"help": "Weak scaling: train on this many questions per rank, instead of --train_size."},
    )
    max_length: int = field(
        default=512, metadata={"help": "Longest sequence in tokens. First to lower when memory runs out."}
    )
    padding: Literal["max_length", "longest"] = field(
        default="max_length",
        metadata={"help": "Pad every batch to --max_length, or only to its longest sequence (faster, same loss)."},
    )
    labels: Literal["sequence", "answer", "all"] = field(
        default="sequence",
        metadata={"help": "Tokens that count in the loss: all real ones, only answer and EOS, or padding as well."},
    )
    em_f1: bool = field(
        default=True,
        metadata={"help": "After training, answer the evaluation questions and print EM and F1."},
    )
