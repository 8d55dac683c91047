"""What the report asks other processes: whether a run still runs, and how much memory Python itself takes."""

import fcntl
import os
from pathlib import Path

import pytest

from estimate.memory import MIB
from estimate.predict_from_record import measure_python_elsewhere
from job import end_of_job
from report_files import add_run, write
from reporting.runs import Run, find_runs

STAGE = "deepspeed-single-gpu/zero_1"


def only(top) -> Run:
    (run,) = find_runs([top])
    return run


def running(top: Path) -> Path:
    return add_run(top, STAGE, "1", status="running", exit_code=None, finished=None)


@pytest.mark.parametrize(
    ("queue", "status"),
    [("echo 1", "running"), ("echo 7", "failed"), ("exit 1", "running")],
    ids=["queued", "gone", "no answer"],
)
def test_slurm_says_whether_a_job_still_runs(tmp_path, monkeypatch, queue, status):
    write(tmp_path / "bin" / "squeue", f"#!/bin/sh\n{queue}\n")
    (tmp_path / "bin" / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    # its answer is kept for a report
    monkeypatch.setattr(end_of_job, "queued_jobs", end_of_job.queued_jobs.__wrapped__)
    running(tmp_path)
    run = only(tmp_path)
    assert run.status == status
    assert run.outcome in ("running", "failed: ended without a word: its node failed, or it was killed")


def test_a_training_without_slurm_runs_as_long_as_it_holds_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(end_of_job, "queued_jobs", list)
    folder = running(tmp_path)
    write(folder / "results" / ".1" / "lock", "")
    with (folder / "results" / ".1" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert only(tmp_path).status == "running"
    assert only(tmp_path).status == "failed"


def test_memory_of_python_does_not_grow_with_the_report():
    ballast = b"x" * 2**30
    assert 200 * MIB < measure_python_elsewhere().cpu < len(ballast)
