"""tracking.py without a key file, and where wandb does not end well; of a job: test_upload_of_a_job.py."""

import os
import shlex

import pytest

import tracking
from shared import trackers
from shell import program


@pytest.fixture
def offline_run(tmp_path, monkeypatch):
    """A job with an offline run, and a `wandb` that does nothing; gives where a key file would be."""
    (tmp_path / "wandb" / "7" / "wandb" / "offline-run-1").mkdir(parents=True)
    wandb = program(tmp_path / "bin", "wandb", 'echo "arguments: $*"')
    monkeypatch.chdir(tmp_path)
    for module in (tracking, trackers):
        monkeypatch.setattr(module, "KEY_FILE", tmp_path / "wandb_key")
    monkeypatch.setenv("PATH", f"{wandb.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "wandb_key"


def test_without_a_key_wandbs_own_login_counts(offline_run, capfd):
    tracking.upload("7")
    assert capfd.readouterr().out == "arguments: sync wandb/7/wandb/offline-run-1\n"
    assert trackers.upload_command("7") == "wandb sync wandb/7/wandb/offline-run-*"
    offline_run.touch()
    assert shlex.split(trackers.upload_command("7"))[1:] == [os.path.relpath(tracking.__file__), "7"]


def test_without_wandb_or_a_run_it_is_one_line(offline_run, refusal, monkeypatch, tmp_path):
    assert "error: wandb/8: contains no offline run; " in refusal(tracking.upload, "8")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert "wandb sync: cannot be started (No such file or directory)" in refusal(tracking.upload, "7", code=3)


def test_an_upload_without_an_end_is_ended(offline_run, refusal, monkeypatch, tmp_path):
    program(tmp_path / "bin", "wandb", "exec sleep 600")
    monkeypatch.setattr(tracking, "UPLOAD_TIMEOUT", 1)
    line = refusal(tracking.upload, "7", code=3)
    assert line == "error: wandb sync: did not end within 1 s; run it on a login node"
