"""Tests of values that the report gets from other processes: a run's state, and Python's memory without a model."""

import os

import pytest

from estimate.predict_from_record import measure_python_elsewhere
from job import end_of_job
from report_files import add_run
from reporting.runs import find_runs
from shared.units import MIB
from shell import program

STAGE = "deepspeed-single-gpu/zero_1"


@pytest.mark.parametrize(
    ("queue", "status"),
    [("echo '1|RUNNING|None|||||/x'", "running"), ("echo '7|RUNNING|None|||||/x'", "failed"), ("exit 1", "running")],
    ids=["queued", "gone", "no answer"],
)
def test_squeue_decides_if_a_job_is_still_running(tmp_path, monkeypatch, queue, status):
    program(tmp_path / "bin", "squeue", queue)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    # queued_jobs caches squeue's answer, so call the function without its cache
    monkeypatch.setattr(end_of_job, "queued_jobs", end_of_job.queued_jobs.__wrapped__)
    add_run(tmp_path, STAGE, "1", status="running", exit_code=None, finished=None)
    (run,) = find_runs([tmp_path])
    assert run.status == status
    assert run.outcome in ("running", "failed: ended without a word: its node failed, or it was killed")


def test_measured_python_memory_does_not_depend_on_the_report_process():
    ballast = b"x" * 2**30
    assert 200 * MIB < measure_python_elsewhere().cpu < len(ballast)
