"""train.py and evaluate.py as commands that end before a training; more mistakes: tests/unit/test_train.py."""

import os
from pathlib import Path

import torch

from fixtures import the_error
from helpers import REPOSITORY
from shell import program
from training.checkpoints import mark_complete


class Code:
    """Unpickled, it creates the folder: a harmless stand-in for any code."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_train_py_ends_with_one_error_line_and_writes_nothing(command):
    finished = command("train.py", "--train_siz", "3")
    assert (finished.code, finished.stdout) == (2, ""), finished
    assert the_error(finished.log) == "error: --train_siz: unknown flag; did you mean --train_size?"
    assert list(finished.folder.iterdir()) == []


def test_so_does_a_mistake_that_is_found_in_the_data(command, sample):
    finished = command("train.py", "--model_name", "tiny-bloom", "--dataset", sample, TRAIN_SIZE="9999")
    assert finished.code == 2, finished
    what = f"9999 questions wanted, but {sample} has 280 to train on; lower it"
    assert the_error(finished.log).startswith(f"error: --train_size or --samples_per_gpu: {what}")
    assert list(finished.folder.iterdir()) == []


def test_train_py_without_a_checkpoint_to_resume_ends_with_4(command, sample):
    words = ("--model_name", "tiny-bloom", "--dataset", sample, "--resume_from_checkpoint")
    finished = command("train.py", *words, OUTPUT_DIR="out")
    assert finished.code == 4, finished
    assert the_error(finished.log) == (
        "error: --resume_from_checkpoint: no complete checkpoint in out; leave the flag out to start anew"
    )
    assert list(finished.folder.iterdir()) == []


def test_a_checkpoint_that_holds_code_ends_with_4_and_runs_none(command, sample, tmp_path):
    checkpoint = tmp_path / "work" / "foreign" / "checkpoint-8"
    states = checkpoint / "global_step8" / "mp_rank_00_model_states.pt"
    states.parent.mkdir(parents=True)
    torch.save({"module": Code(tmp_path / "executed")}, states)
    mark_complete(checkpoint, {"world_size": 1, "strategy": "plain"})
    words = ("--model_name", "tiny-bloom", "--dataset", sample, "--resume_from_checkpoint", "foreign")
    done = command("train.py", *words)
    assert done.code == 4, done
    what = "foreign/checkpoint-8/global_step8/mp_rank_00_model_states.pt: holds posix.mkdir, which is code and no data"
    assert the_error(done.log) == f"error: {what}; resume from a checkpoint that your own run has written"
    assert not (tmp_path / "executed").exists()
    assert [path.name for path in done.folder.iterdir()] == ["foreign"]


def test_a_training_that_cannot_compile_its_optimizer_ends_with_3(command, sample, tmp_path):
    program(tmp_path / "old", "c++", "exit 1")
    words = ("--model_name", "tiny-bloom", "--dataset", sample, "--deepspeed")
    path = f"{tmp_path / 'old'}:{os.environ['PATH']}"
    config = REPOSITORY / "ds_configs" / "zero2.json"
    done = command("train.py", *words, config, PATH=path, TRAIN_SIZE="8", EVAL_SIZE="4")
    assert done.code == 3
    assert done.error_lines == [
        "error: c++: does not know -std=c++20, which PyTorch's headers need (exit code 1); "
        "load GCC 11 or newer in site_setup (module load gcc)"
    ]
    assert not list(done.folder.iterdir())


def test_evaluate_py_refuses_what_it_would_ignore(command):
    finished = command("evaluate.py", "--deepspeed", "a.json")
    assert finished.code == 2, finished
    assert the_error(finished.log).startswith("error: --deepspeed: evaluation holds the whole model on every rank")
