"""preflight.py --submit on the cluster: three real jobs, and a site that it must refuse."""

import subprocess
import sys

import pytest

from cluster import run as run_command
from jobs import Lab

JOBS = ("baseline", "deepspeed-multi-node/2_nodes", "deepspeed-native-launch/zero3_offload")

BROKEN = """
from errors import WorkshopError, run_program

def main():
    raise WorkshopError("GPU", "broken", "repair it", 3)

run_program(main)
"""


@pytest.fixture
def own_lab(cluster, tmp_path) -> Lab:
    """A copy of the repository that a test may edit."""
    return Lab(tmp_path, cluster)


def preflight(lab: Lab, *flags: str, **variables: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/preflight.py", "--quick", "--submit", *flags]
    environment = lab.environment(**variables)
    return subprocess.run(command, cwd=lab.root, env=environment, capture_output=True, text=True, timeout=800)


def unfinished(lab: Lab) -> list[str]:
    lines = run_command(["squeue", "--noheader", "--format=%i %Z"], env=lab.cluster.env).stdout.splitlines()
    return [line for line in lines if f" {lab.root}/" in line]


def test_one_job_per_launcher_completes(own_lab):
    status = ["git", "status", "--porcelain", "--ignored"]
    before = run_command(status, cwd=own_lab.root).stdout
    done = preflight(own_lab)
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert "ok    partition          Slurm's default of main" in lines
    for job in JOBS:
        assert [line.split()[-1] for line in lines if job in line.split()[:2]] == ["COMPLETED"], done
    after = run_command(status, cwd=own_lab.root).stdout
    assert [line for line in after.splitlines() if "__pycache__" not in line] == before.splitlines()
    assert unfinished(own_lab) == []


def test_what_the_cluster_refuses_or_ends_is_a_failed_line(own_lab):
    """No such partition; and jobs that start, but whose training breaks."""
    done = preflight(own_lab, SBATCH_PARTITION="no_such")
    assert done.returncode == 3, done
    unknown, refused = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert "there is no no_such among main" in unknown
    assert "submit.sh" in refused and "nvalid partition" in refused

    (own_lab.root / "scripts/train.py").write_text(BROKEN)
    done = preflight(own_lab)
    assert done.returncode == 3, done
    failed = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert len(failed) == len(JOBS), done
    assert all("FAILED (NonZeroExitCode); error: GPU: broken; repair it; read " in line for line in failed), done


def test_jobs_that_do_not_start_are_cancelled(own_lab):
    partition = ["scontrol", "update", "PartitionName=main"]
    run_command([*partition, "State=DOWN"], env=own_lab.cluster.env)
    try:
        done = preflight(own_lab, "--timeout", "3")
    finally:
        run_command([*partition, "State=UP"], env=own_lab.cluster.env)
    assert done.returncode == 3, done
    failed = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert [line.split("; ")[0].split()[2:] for line in failed] == [
        ["PENDING", "(PartitionDown)"], ["PENDING", "(Dependency)"], ["PENDING", "(Dependency)"]]  # fmt: skip
    assert unfinished(own_lab) == []
    assert not list(own_lab.root.glob(".preflight-*"))
