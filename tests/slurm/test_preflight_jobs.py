"""Tests of preflight.py --submit on the test cluster: one real job per launcher, and jobs that do not start."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from cluster import run as run_command
from helpers import RUN_TIMEOUT, until
from jobs import Lab

JOBS = ("baseline", "deepspeed-multi-node/2_nodes", "deepspeed-native-launch/zero3_offload")
BROKEN = """if "LOCAL_RANK" not in __import__("os").environ and "--deepspeed" in __import__("sys").argv:
    from shared.errors import WorkshopError, run_program
    def refuse():
        raise WorkshopError("GPU", "broken", "repair it", 3)
    run_program(refuse)
"""


def preflight(lab: Lab, *flags: str, run: Callable = subprocess.run, **options: Any) -> Any:
    command = [sys.executable, "scripts/preflight.py", "--quick", "--submit", *flags]
    return run(command, cwd=lab.root, stdout=subprocess.PIPE, text=True, **{"env": lab.environment()} | options)


def test_preflight_runs_one_job_per_launcher_and_reports_failures(editable_lab):
    """Bare srun sets no LOCAL_RANK, so BROKEN makes only the training under bare srun fail."""
    train = editable_lab.root / "scripts/train.py"
    text = train.read_text()
    train.write_text(BROKEN + text)
    status = ["git", "status", "--porcelain", "--ignored"]
    before = run_command(status, cwd=editable_lab.root).stdout
    done = preflight(editable_lab)
    assert done.returncode == 3, done
    lines = done.stdout.splitlines()
    assert "ok    partition          Slurm's default of main" in lines
    for job in JOBS[:2]:
        assert [line.split()[-1] for line in lines if job in line.split()[:2]] == ["COMPLETED"], done
    (failed,) = [line for line in lines if line.startswith("fail")]
    assert JOBS[2] in failed
    assert "FAILED (NonZeroExitCode); error: GPU: broken; repair it; read " in failed
    after = run_command(status, cwd=editable_lab.root).stdout
    left = [line for line in after.splitlines() if "__pycache__" not in line and "preflight" not in line]
    assert left == before.splitlines()
    assert editable_lab.unfinished() == []


@pytest.mark.faults
def test_jobs_that_do_not_start_are_cancelled_at_the_time_limit_and_at_sigterm(editable_lab):
    """A wrong value ends the dry runs at once, which would take most of the time."""
    wrong = editable_lab.environment(RANKS_PER_GPU="none")
    partition = ["scontrol", "update", "PartitionName=main"]
    run_command([*partition, "State=DOWN"], env=editable_lab.cluster.env)
    try:
        done = preflight(editable_lab, "--timeout", "3", env=wrong)
        stopped = preflight(editable_lab, run=subprocess.Popen, env=wrong)
        until(lambda: len(editable_lab.unfinished()) == len(JOBS), RUN_TIMEOUT, lambda: stopped.poll() is not None)
        stopped.terminate()
        stopped.communicate(timeout=RUN_TIMEOUT)
    finally:
        run_command([*partition, "State=UP"], env=editable_lab.cluster.env)
    assert done.returncode == 3, done
    _, *failed = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert [line.split("; ")[0].split()[2:] for line in failed] == [
        ["PENDING", "(PartitionDown)"], ["PENDING", "(Dependency)"], ["PENDING", "(Dependency)"]]  # fmt: skip
    assert editable_lab.unfinished() == []
    assert not list(editable_lab.root.glob(".preflight-*"))
