"""Tests of train.py's checks before the training: one mistake of each kind, in the order of the checks.

tests/commands/test_train_command.py starts train.py as a process.
"""

import json
from pathlib import Path

import pytest
from transformers import GPT2Config

import train
from helpers import REPOSITORY

COMMANDS = [
    ("variable", "", {"FP16": "True"}, "FP16: fp16 needs a CUDA GPU, and this machine has none; use --bf16"),
    ("contradiction", "--deepspeed IN/lr.json", {}, "IN/lr.json: contradicts the flags: ds optimizer.params.lr"),
    ("data file", "--model_name tiny-bloom --dataset IN/empty.json", {}, "IN/empty.json: Expecting value: line 1 "),
    (
        "launcher",
        "--model_name tiny-bloom",
        {"WORLD_SIZE": "abc"},
        "WORLD_SIZE: is 'abc', not a whole number; unset it",
    ),
    (
        "few tokens",
        "--model_name IN/gpt2 --tokenizer_name tiny-bloom --from_scratch --dataset SAMPLE",
        {},
        "--model_name: its tokenizer has 2048 tokens, the model 100; use a matching pair",
    ),
    (
        "too few questions",
        "--model_name tiny-bloom --dataset SAMPLE --train_size 9999",
        {},
        "--train_size or --samples_per_gpu: 9999 rows requested, but SAMPLE has only 280 to train on; lower it",
    ),
    (
        "too few to evaluate on",
        "--model_name tiny-bloom --dataset SAMPLE --train_size 8 --eval_size 68",
        {},
        "--eval_size: 68 rows requested, but SAMPLE has only 67 to evaluate on; lower it",
    ),
    (
        "finished run",
        "--model_name tiny-bloom --dataset SAMPLE --output_dir IN/model",
        {},
        "IN/model: holds the model of a finished run; give another --output_dir",
    ),
    (
        "finished run that saved only its adapters",
        "--model_name tiny-bloom --dataset SAMPLE --output_dir IN/lora",
        {},
        "IN/lora: holds the model of a finished run; give another --output_dir",
    ),
]


@pytest.mark.parametrize(("words", "variables", "beginning"), [c[1:] for c in COMMANDS], ids=[c[0] for c in COMMANDS])
def test_a_mistake_is_one_line_and_writes_nothing(
    words, variables, beginning, main_of, refusal, monkeypatch, tmp_path, sample
):
    inputs = tmp_path / "inputs"
    for path in (inputs / "model" / "config.json", inputs / "lora" / "adapter" / "adapter_config.json"):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    (inputs / "empty.json").write_text("")
    GPT2Config(vocab_size=100).save_pretrained(inputs / "gpt2")
    literal = json.loads((REPOSITORY / "ds_configs" / "zero1.json").read_text())
    literal["optimizer"]["params"]["lr"] = 0.001
    (inputs / "lr.json").write_text(json.dumps(literal))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def fill(text: str) -> str:
        return text.replace("SAMPLE", str(sample)).replace("IN/", f"{inputs}/")

    line = refusal(main_of, train, *map(fill, words.split()))
    assert line.startswith(f"error: {fill(beginning)}")
    assert list(Path().iterdir()) == []
