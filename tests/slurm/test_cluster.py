"""Tests of the test cluster: jobs are scheduled, run and cancelled, nodes crash, and no process or file is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from breakable_cluster import BreakableCluster, remains
from cluster import ClusterError, run
from helpers import REPOSITORY, until

HERE = Path(__file__).parent
LIMIT = 60  # seconds until a hang fails a test; actions take one or two seconds


def submit(cluster, folder, body, *sbatch_arguments, arguments=()):
    """Submit a shell script with this body from `folder`, and return the job id and the path of its output."""
    (folder / "job.sh").write_text(f"#!/bin/bash\n{body}\n")
    words = ["sbatch", "--parsable", *sbatch_arguments, "job.sh", *arguments]
    job = run(words, cwd=folder, env=cluster.env).stdout.strip()
    return job, folder / f"slurm-{job}.out"


def test_each_node_of_a_job_has_its_own_name_address_and_gpus(cluster, tmp_path):
    folder = tmp_path / 'it\'s a "folder"'
    folder.mkdir()
    node = "echo $(hostname) $SLURM_PROCID $(getent hosts node2 | cut -d' ' -f1) $CUDA_VISIBLE_DEVICES"
    body = 'srun sh -c "$1"\necho "$2" "$PWD"\nexit 7'
    shape = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2")
    job, output = submit(cluster, folder, body, *shape, arguments=(node, "a b"))
    assert cluster.wait(job, LIMIT) == ("FAILED", 7)
    address = cluster.exec("node1", ["getent", "hosts", "node2"]).stdout.split()[0]
    assert not address.startswith("127.")
    own_name_is_loopback = "node2 1 127.0.1.1 0,1"
    assert sorted(output.read_text().splitlines()) == sorted(
        [f"node1 0 {address} 0,1", own_name_is_loopback, f"a b {folder}"]
    )
    with pytest.raises(ClusterError, match="not available"):
        submit(cluster, folder, body, "--gpus-per-node=9")


# The orphan must not fork. Without cgroups, a child that starts while Slurm lists a step's processes survives.
TASK = """
setsid sh -c 'trap "" TERM HUP INT; exec sleep 601' > /dev/null 2>&1 &
sleep $1
"""


def test_no_orphan_outlives_its_job(cluster, tmp_path):
    (tmp_path / "task").write_text(TASK)
    body = "sh task 0\nsrun sh task 600"  # leaves an orphan of the batch step, and one on each node
    job, _ = submit(cluster, tmp_path, body, "--nodes=2", "--ntasks-per-node=1")

    def processes(node):
        return list(cluster.processes(node, f"SLURM_JOB_ID={job}\0").values())

    assert until(lambda: processes("node1").count("sleep 601") == 2 and "sleep 601" in processes("node2"))
    with pytest.raises(TimeoutError, match=f"(?s)job {job} has not ended after 0.5 s.*JobState=.*JOBID"):
        cluster.wait(job, 0.5)
    run(["scancel", job], env=cluster.env)
    assert cluster.wait(job, LIMIT)[0] == "CANCELLED"
    assert [processes(node) for node in cluster.nodes] == [[], []]


def test_a_node_crashes_and_comes_back(cluster, tmp_path):
    job, _ = submit(cluster, tmp_path, "sleep 600", "--nodelist=node2", "--no-requeue")
    assert until(lambda: cluster.processes("node2", f"SLURM_JOB_ID={job}\0"))
    cluster.crash("node2")
    try:
        assert cluster.processes("node2") == {}
        with pytest.raises(ClusterError, match="node2 is not running"):
            cluster.exec("node2", ["true"])
        assert cluster.wait(job, LIMIT)[0] == "NODE_FAIL"
    finally:
        cluster.start("node2")
    # node1 still has node2's hardware address in its ARP cache, and must reach it at once after the restart
    reached = cluster.exec("node1", ["timeout", "5", "bash", "-c", "</dev/tcp/node2/6818"])
    # If slurmd does not listen yet, packets arrive but the node refuses the connection
    assert reached.returncode == 0 or "refused" in reached.stderr, reached
    job, output = submit(cluster, tmp_path, "srun hostname", "--nodes=2")
    assert cluster.wait(job, LIMIT)[0] == "COMPLETED"
    assert sorted(output.read_text().split()) == cluster.nodes


def test_a_new_cluster_removes_the_cluster_of_a_dead_owner(cluster):
    script = (
        "import os, signal, sys; from breakable_cluster import BreakableCluster\n"
        "BreakableCluster(sys.argv[1], nodes=1, owner=os.getpid()).up(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    orphan, next_one = f"{cluster.state}c", BreakableCluster(f"{cluster.state}d", nodes=1)
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}/scripts"}
    killed = subprocess.run([sys.executable, "-c", script, orphan], cwd=HERE, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(remains(orphan)) > 5
    next_one.up()
    next_one.down()
    next_one.down()  # has no effect on a cluster that is down
    assert remains(orphan) == remains(next_one.state) == []
    assert cluster.exec("node1", ["hostname"]).stdout == "node1\n"  # this cluster's owner is alive


def test_a_foreign_directory_is_left_alone(cluster, tmp_path):
    (tmp_path / "precious").touch()
    link = Path(f"{cluster.state}e")
    os.rename(tmp_path, link)
    try:
        with pytest.raises(ClusterError, match="holds other files"):
            BreakableCluster(link).up()
        BreakableCluster(link).down()
        assert (link / "precious").exists()
    finally:
        os.rename(link, tmp_path)
