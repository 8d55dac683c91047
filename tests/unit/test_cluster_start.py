"""Unit tests of scripts/cluster.py: a machine that can run no cluster, and job ids. tests/slurm starts clusters."""

import subprocess

import pytest

import cluster
from report_files import write
from shared.errors import WorkshopError

# The message of a kernel that lets only root create user namespaces, as AppArmor on Ubuntu 24.04 does
REFUSED = "unshare: write failed /proc/self/uid_map: Operation not permitted\n"


def test_missing_programs_are_named_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr(cluster, "PATH", "/nowhere")
    with pytest.raises(
        WorkshopError, match=r"cluster: munged, slurmctld, .*: not installed; .*apt-get install slurm-wlm munge "
    ) as no:
        cluster.check_machine()
    assert no.value.code == 3


@pytest.mark.parametrize(
    ("rootless", "remedy"), [(("unshare", "--user"), "run: sudo make cluster"), ((), "use a virtual machine")]
)
def test_a_machine_without_namespaces_is_named(monkeypatch, rootless, remedy):
    refused = subprocess.CompletedProcess([], 1, "", REFUSED)
    monkeypatch.setattr(cluster, "TOOLS", ())
    monkeypatch.setattr(cluster, "ROOTLESS", rootless)
    monkeypatch.setattr(cluster, "run", lambda *_, **__: refused)
    with pytest.raises(WorkshopError) as error:
        cluster.check_machine()
    assert error.value.what == f"this machine does not permit namespaces ({REFUSED.strip()})"
    assert error.value.remedy.startswith(remedy)


def test_new_jobs_have_ids_above_those_of_all_files(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "EXPERIMENTS", tmp_path / "experiments")
    monkeypatch.setattr(cluster, "REPOSITORY", tmp_path)
    assert cluster.first_unused_job_id() == 1
    write(tmp_path / "experiments/ddp/1_gpus/log/ddp_12.out", "")
    write(tmp_path / "experiments/baseline/results/7.json", "")
    write(tmp_path / "experiments/baseline/log/baseline_local-20261126-104500-99999.out", "")
    assert cluster.first_unused_job_id() == 13
    write(tmp_path / "slurm-15.out", "")  # the output of sbatch --wrap
    assert cluster.first_unused_job_id() == 16


def test_a_path_that_slurm_cannot_use_is_refused():
    with pytest.raises(cluster.ClusterError, match="over 60 or special characters"):
        cluster.Cluster("/tmp/with a blank")
