"""tracking.py: the upload by `wandb sync`, with a stand-in for it that shows how it was called."""

import os
import shlex

import pytest

import tracking
from shell import program


@pytest.fixture
def offline_run(tmp_path, monkeypatch):
    """A job with an offline run, a key file, and a `wandb` that shows how it was called."""
    (tmp_path / "wandb" / "7" / "wandb" / "offline-run-1").mkdir(parents=True)
    key = tmp_path / "wandb_key"
    key.write_text("s3cret\n")
    key.chmod(0o600)
    wandb = program(
        tmp_path / "bin", "wandb", 'echo "arguments: $*"\n[ "$WANDB_API_KEY" = s3cret ] && echo "has the key"'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "KEY_FILE", key)
    monkeypatch.setenv("PATH", f"{wandb.parent}{os.pathsep}{os.environ['PATH']}")
    return key


def test_upload_hands_the_key_over_where_ps_does_not_show_it(offline_run, capfd):
    tracking.upload("7")
    assert capfd.readouterr().out == "arguments: sync wandb/7/wandb/offline-run-1\nhas the key\n"


def test_the_printed_command_uses_the_key_file_where_there_is_one(offline_run):
    assert shlex.split(tracking.upload_command("7"))[1:] == [os.path.relpath(tracking.__file__), "7"]
    offline_run.unlink()
    assert tracking.upload_command("7") == "wandb sync wandb/7/wandb/offline-run-*"


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_key_that_others_may_read_is_refused(offline_run, refusal, capfd, mode):
    offline_run.chmod(mode)
    line = refusal(tracking.upload, "7", code=3)
    assert line.endswith("others may read the key; chmod 600 it")
    assert capfd.readouterr().out == ""


def test_without_wandb_or_a_run_it_is_one_line(offline_run, refusal, monkeypatch, tmp_path):
    assert "error: wandb/8: holds no offline run; " in refusal(tracking.upload, "8")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert "wandb sync: cannot be started (No such file or directory)" in refusal(tracking.upload, "7", code=3)


def test_an_upload_without_an_end_is_ended(offline_run, refusal, monkeypatch, tmp_path):
    program(tmp_path / "bin", "wandb", "exec sleep 600")
    monkeypatch.setattr(tracking, "UPLOAD_TIMEOUT", 1)
    line = refusal(tracking.upload, "7", code=3)
    assert line == "error: wandb sync: did not end within 1 s; run it on a login node"
