"""Tests of tracking.py without a key file and with a failing wandb. test_upload_of_a_job.py tests uploads of jobs."""

import os
import shlex

import pytest

import tracking
from shared import tracker_setup
from shell import program


@pytest.fixture
def offline_run(tmp_path, monkeypatch):
    """Create a job's offline run and a stub for `wandb`, and return the path for a key file."""
    (tmp_path / "wandb" / "7" / "wandb" / "offline-run-1").mkdir(parents=True)
    wandb = program(tmp_path / "bin", "wandb", 'echo "arguments: $*"')
    monkeypatch.chdir(tmp_path)
    for module in (tracking, tracker_setup):
        monkeypatch.setattr(module, "KEY_FILE", tmp_path / "wandb_key")
    monkeypatch.setenv("PATH", f"{wandb.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "wandb_key"


def test_wandbs_own_login_is_used_without_a_key_file(offline_run, capfd):
    tracking.upload("7")
    assert capfd.readouterr().out == "arguments: sync wandb/7/wandb/offline-run-1\n"
    assert tracker_setup.upload_command("7") == "wandb sync wandb/7/wandb/offline-run-*"
    offline_run.touch()
    assert shlex.split(tracker_setup.upload_command("7"))[1:] == [os.path.relpath(tracking.__file__), "7"]


def test_a_missing_wandb_or_run_gives_one_error_line(offline_run, refusal, monkeypatch, tmp_path):
    assert "error: wandb/8: contains no offline run; " in refusal(tracking.upload, "8")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert "wandb sync: cannot be started (No such file or directory)" in refusal(tracking.upload, "7", code=3)


def test_an_upload_that_hangs_is_ended(offline_run, refusal, monkeypatch, tmp_path):
    program(tmp_path / "bin", "wandb", "exec sleep 600")
    monkeypatch.setattr(tracking, "UPLOAD_TIMEOUT", 1)
    line = refusal(tracking.upload, "7", code=3)
    assert line == "error: wandb sync: did not end within 1 s; run it on a login node"
