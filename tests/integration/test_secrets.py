"""Tests that no secret of the environment gets into a run's records, logs, checkpoints, trackers or tracebacks."""

import importlib.util

import pytest
import torch

from canaries import CANARIES, find_leaks
from helpers import TINY
from workbench import Bench

# Crash after the first checkpoint
CRASH = """
from guard.checkpoints import CheckpointCallback

def on_save(self, args, state, control, original=CheckpointCallback.on_save, **kwargs):
    original(self, args, state, control, **kwargs)
    raise RuntimeError("crash")

CheckpointCallback.on_save = on_save
"""
TRACKER = "wandb" if importlib.util.find_spec("wandb") else "none"


@pytest.mark.promise("no secret in any file")
def test_no_file_of_a_run_that_fails_holds_a_secret(server, tmp_path):
    bench = Bench(server, tmp_path / "work", TINY)
    folder = bench.folder
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    private = {"HOME": folder / "home", "TMPDIR": folder / "tmp", "HF_HOME": folder / "hf"}
    options = {"ranks": 2, "launcher": "launch.py", "BATCH_SIZE": 2, "REPORT_TO": TRACKER, "JOB_ID": "canaries"}
    failed = bench.run(script=bench.patched(CRASH).name, code=1, **options, **private, **CANARIES)
    assert "RuntimeError: crash" in failed.log
    assert failed.record["status"] == "failed"
    assert (failed.output / "checkpoint-4" / "training_args.bin").is_file()
    assert TRACKER == "none" or list(folder.glob("wandb/canaries/wandb/offline-run-*/*.wandb"))
    assert find_leaks(tmp_path) == []
    torch.save({"token": CANARIES["HF_TOKEN"]}, tmp_path / "planted")
    assert find_leaks(tmp_path) == ["HF_TOKEN in planted"]
