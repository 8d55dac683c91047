"""tracking.py: the upload by `wandb sync`, with a stand-in for it that shows how it was called."""

import os
import shlex

import psutil
import pytest

import tracking
from shell import program, until


@pytest.fixture
def offline_run(tmp_path, monkeypatch):
    """A job with an offline run, a key file, and a `wandb` that shows how it was called."""
    (tmp_path / "wandb" / "7" / "wandb" / "offline-run-1").mkdir(parents=True)
    key = tmp_path / "wandb_key"
    key.write_text("s3cret\n")
    wandb = program(tmp_path / "bin", "wandb", 'echo "arguments: $*"\necho "key: $WANDB_API_KEY"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "KEY_FILE", key)
    monkeypatch.setenv("PATH", f"{wandb.parent}{os.pathsep}{os.environ['PATH']}")
    return key


def test_upload_hands_the_key_over_where_ps_does_not_show_it(offline_run, capfd):
    offline_run.chmod(0o600)
    tracking.upload("7")
    shown = capfd.readouterr()
    assert "arguments: sync wandb/7/wandb/offline-run-1\nkey: ***\n" in shown.out, "it had the key, and no log has it"


def test_the_printed_command_uses_the_key_file_where_there_is_one(offline_run):
    assert shlex.split(tracking.upload_command("7"))[1:] == [os.path.relpath(tracking.__file__), "7"]
    offline_run.unlink()
    assert tracking.upload_command("7") == "wandb sync wandb/7/wandb/offline-run-*"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_key_that_others_may_read_is_refused(offline_run, refusal, capfd, mode):
    offline_run.chmod(mode)
    line = refusal(tracking.upload, "7", code=3)
    assert "s3cret" not in "".join([line, *capfd.readouterr()])


def test_an_upload_that_does_not_end_is_ended_with_all_its_processes(
    offline_run, refusal, capfd, monkeypatch, tmp_path
):
    offline_run.chmod(0o600)
    program(tmp_path / "bin", "wandb", f'echo "at $WANDB_API_KEY"; sleep 600 & echo $! >"{tmp_path}/child"; wait')
    monkeypatch.setattr(tracking, "UPLOAD_TIMEOUT", 2)
    assert "wandb sync: did not end within 2 s; run it on a login node" in refusal(tracking.upload, "7", code=3)
    assert capfd.readouterr().out == "at ***\n"
    child = int((tmp_path / "child").read_text())
    until(lambda: has_ended(child))


def has_ended(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_without_wandb_it_is_one_line(offline_run, refusal, monkeypatch, tmp_path):
    offline_run.chmod(0o600)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert "wandb sync: cannot be started (No such file or directory)" in refusal(tracking.upload, "7", code=3)
