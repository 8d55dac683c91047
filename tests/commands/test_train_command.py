"""train.py and evaluate.py as commands that end before a training; more mistakes: tests/unit, tests/faults."""

import os

import pytest

from helpers import REPOSITORY, the_error
from shell import program


def test_a_training_that_cannot_compile_its_optimizer_ends_with_3(command, sample, tmp_path):
    program(tmp_path / "old", "c++", "exit 1")
    words = ("--model_name", "tiny-bloom", "--dataset", sample, "--deepspeed")
    path = f"{tmp_path / 'old'}:{os.environ['PATH']}"
    config = REPOSITORY / "ds_configs" / "zero2.json"
    done = command("train.py", *words, config, PATH=path, TRAIN_SIZE="8", EVAL_SIZE="4")
    assert done.code == 3
    assert done.error_lines == [
        "error: c++: does not know -std=c++20, which PyTorch's headers need (exit code 1); "
        "load GCC 10 or newer in site_setup (module load gcc)"
    ]
    assert not list(done.folder.iterdir())


@pytest.mark.parametrize(("flag", "value"), [("--deepspeed", "a.json"), ("--tensor_parallel", "2")])
def test_evaluate_py_refuses_what_it_would_ignore(command, flag, value):
    finished = command("evaluate.py", flag, value)
    assert finished.code == 2, finished
    assert the_error(finished.log).startswith(f"error: {flag}: evaluation holds the whole model on every rank")
