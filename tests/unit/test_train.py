"""train.py and evaluate.py up to the training: one of each kind of mistake, in the order in which they are found."""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
from transformers import GPT2Config

import evaluate
import train
from helpers import REPOSITORY


@pytest.fixture
def started(main_of, refusal, monkeypatch):
    """Runs the script, which must end with one line and write nothing; gives the line."""

    def run(script, *words: object, code: int = 2, **variables: str) -> str:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        # it starts c++ where DeepSpeed's optimizers are not yet compiled: tests/commands/test_compiler.py
        monkeypatch.setattr(train, "check_compiler", lambda config: None)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        line = refusal(main_of, script, *words, code=code)
        assert list(Path().iterdir()) == []
        return line

    return run


COMMANDS = [
    ("unknown flag", "--train_siz 3", {}, "--train_siz: unknown flag; did you mean --train_size?"),
    ("variable", "", {"FP16": "True"}, "FP16: fp16 needs a CUDA GPU and there is none here; use --bf16"),
    ("DeepSpeed file", "--deepspeed IN/broken.json", {}, "IN/broken.json: Expecting property name "),
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
        "--train_size or --samples_per_gpu: 9999 questions wanted, but SAMPLE has 280 to train on; lower it",
    ),
    (
        "offline",
        "--model_name nobody/nothing --dataset SAMPLE",
        {"HF_HUB_OFFLINE": "1"},
        "--model_name: nobody/nothing is no local path, not in the cache, and there is no network; "
        "on a login node run: python scripts/prefetch.py --model_name nobody/nothing --dataset SAMPLE",
    ),
    (
        "finished run",
        "--model_name tiny-bloom --dataset SAMPLE --output_dir IN/model",
        {},
        "IN/model: holds the model of a finished run; give another --output_dir",
    ),
]


@pytest.mark.parametrize(("words", "variables", "beginning"), [c[1:] for c in COMMANDS], ids=[c[0] for c in COMMANDS])
def test_a_mistake_is_one_line_and_writes_nothing(words, variables, beginning, started, tmp_path, sample):
    inputs = tmp_path / "inputs"
    (inputs / "model").mkdir(parents=True)
    (inputs / "model" / "config.json").write_text("{}")
    (inputs / "broken.json").write_text("{\n")
    (inputs / "empty.json").write_text("")
    GPT2Config(vocab_size=100).save_pretrained(inputs / "gpt2")
    literal = json.loads((REPOSITORY / "ds_configs" / "zero1.json").read_text())
    literal["optimizer"]["params"]["lr"] = 0.001
    (inputs / "lr.json").write_text(json.dumps(literal))

    def fill(text: str) -> str:
        return text.replace("SAMPLE", str(sample)).replace("IN/", f"{inputs}/")

    line = started(train, *map(fill, words.split()), **variables)
    assert line.startswith(f"error: {fill(beginning)}")


def test_train_py_without_a_checkpoint_to_resume_ends_with_4(started, sample):
    words = ("--model_name", "tiny-bloom", "--dataset", sample, "--resume_from_checkpoint")
    assert started(train, *words, code=4, OUTPUT_DIR="out") == (
        "error: --resume_from_checkpoint: no complete checkpoint in out; leave the flag out to start anew"
    )


def test_evaluate_py_refuses_what_it_would_ignore(started):
    line = started(evaluate, "--deepspeed", "a.json")
    assert line.startswith("error: --deepspeed: evaluation holds the whole model on every rank")
