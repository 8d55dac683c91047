"""Runs whose record says that they run: report.py looks for them among this machine's processes."""

import os
import subprocess

from report_files import add_run
from reporting import runs as report_runs
from reporting.runs import find_runs


def test_a_run_runs_while_its_process_or_its_job_does(tmp_path, monkeypatch):
    command = ["bash", "-c", "echo; read -t 600 line; : train.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as training:
        training.stdout.readline()  # a process has no command line for a moment after its start
        here = {"nodes": [os.uname().nodename], "pid": training.pid}
        add_run(tmp_path, "deepspeed-single-gpu/zero_1", "1", status="running", finished=None, **here)
        (run,) = find_runs([tmp_path])
        assert run.status == "running"
    (run,) = find_runs([tmp_path])
    assert run.ended == "failed: the record still says running, but its job is gone"
    monkeypatch.setattr(report_runs, "queued_jobs", lambda: frozenset({"1"}))
    (run,) = find_runs([tmp_path])
    assert run.status == "running"
