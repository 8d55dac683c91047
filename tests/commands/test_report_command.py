"""Runs whose record says that they run: report.py looks for them among this machine's processes."""

import os
import subprocess

from report_files import add_run
from reporting import runs as report_runs
from reporting.runs import Run, find_runs

STAGE = "deepspeed-single-gpu/zero_1"


def only(top) -> Run:
    (run,) = find_runs([top])
    return run


def test_running_record_of_a_dead_job_has_failed(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    add_run(tmp_path, STAGE, "1", status="running", finished=None, nodes=[os.uname().nodename], pid=ended.pid)
    run = only(tmp_path)
    assert run.ended == "failed: the record still says running, but its job is gone"


def test_running_job_runs(tmp_path, monkeypatch):
    add_run(tmp_path, STAGE, "1", status="running")
    monkeypatch.setattr(report_runs, "queued_jobs", lambda: frozenset({"1"}))
    assert only(tmp_path).status == "running"
    command = ["bash", "-c", "echo; read -t 60 line; : train.py"]
    sleeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        sleeper.stdout.readline()  # a process has no command line for a moment after its start
        add_run(tmp_path, STAGE, "1", status="running", nodes=[os.uname().nodename], pid=sleeper.pid)
        monkeypatch.setattr(report_runs, "queued_jobs", lambda: frozenset())
        assert only(tmp_path).status == "running"
    finally:
        sleeper.kill()
        sleeper.communicate()
