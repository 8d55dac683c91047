"""The fixture itself: the cluster schedules, runs, cancels, crashes and cleans up as a real one does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cluster as module
from cluster import Cluster, ClusterError

COMMAND = [sys.executable, module.__file__]
NODES = ("node1", "node2")


def submit(cluster, folder, body, *sbatch_args):
    """Submit a shell script with this body from folder; return the job id and the path of its output."""
    (folder / "job.sh").write_text(f"#!/bin/bash\n{body}\n")
    job = cluster.submit("job.sh", cwd=folder, sbatch_args=sbatch_args)
    return job, folder / f"slurm-{job}.out"


def until(condition, timeout=20):
    """Wait at most timeout seconds for condition() to be true, and return its value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def left_of(state):
    """What this machine has of a cluster: command lines of its processes, its interfaces, its directory."""
    found = [str(path) for path in [Path(state)] if path.exists()]
    links = subprocess.check_output(["ip", "-oneline", "link"], text=True)
    found += [line for line in links.splitlines() if Cluster(state)._mac in line]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + b"\0" + (process / "environ").read_bytes()
        except OSError:
            continue
        if f"{state}/".encode() in text:
            found.append(text.partition(b"\0\0")[0].decode())
    return found


def test_two_nodes_have_names_and_ranks_of_their_own(cluster, tmp_path):
    body = "srun sh -c 'echo $(hostname) $SLURM_PROCID $(getent hosts node2 | cut -d\" \" -f1)'"
    job, output = submit(cluster, tmp_path, body, "--nodes=2", "--ntasks-per-node=1")
    assert cluster.wait(job, 20)["state"] == "COMPLETED"
    address = cluster.exec("node1", ["getent", "hosts", "node2"]).stdout.split()[0]
    assert not address.startswith("127.")
    own_name_is_loopback = "node2 1 127.0.1.1"
    assert sorted(output.read_text().splitlines()) == [f"node1 0 {address}", own_name_is_loopback]


def test_gpus_are_counted(cluster, tmp_path):
    body = "echo $SLURM_GPUS_ON_NODE $CUDA_VISIBLE_DEVICES $SLURM_CPUS_ON_NODE"
    job, output = submit(cluster, tmp_path, body, "--gpus-per-node=2", "--cpus-per-task=16")
    assert cluster.wait(job, 20)["state"] == "COMPLETED"
    assert output.read_text() == "2 0,1 16\n"
    with pytest.raises(ClusterError, match="not available"):
        submit(cluster, tmp_path, body, "--gpus-per-node=9")


def test_failure_keeps_its_exit_code(cluster, tmp_path):
    job, _ = submit(cluster, tmp_path, "exit 7")
    ended = cluster.wait(job, 20)
    assert (ended["state"], ended["exit_code"], ended["signal"]) == ("FAILED", 7, 0)


def test_variables_and_arguments_reach_the_job(cluster, tmp_path):
    folder = tmp_path / 'it\'s a "folder"'
    folder.mkdir()
    (folder / "job.sh").write_text('#!/bin/bash\necho "$KNOB" "$@" "$PWD"\n')
    job = cluster.submit("job.sh", "--lr", "a b", cwd=folder, env={"KNOB": "x y"})
    assert cluster.wait(job, 20)["state"] == "COMPLETED"
    assert (folder / f"slurm-{job}.out").read_text() == f"x y --lr a b {folder}\n"


def test_wait_names_what_it_waited_for(cluster, tmp_path):
    job, _ = submit(cluster, tmp_path, "sleep 600")
    with pytest.raises(TimeoutError, match=f"(?s)job {job} has not ended after 0.5 s.*JobState=.*JOBID"):
        cluster.wait(job, 0.5)
    cluster.cancel(job)
    assert cluster.wait(job, 20)["state"] == "CANCELLED"
    with pytest.raises(ClusterError, match="Invalid job id"):
        cluster.wait(999999, 1)


# The orphan must not fork: without cgroups, a child born while Slurm lists a step's processes outlives them.
TASK = """
setsid sh -c 'trap "" TERM HUP INT; exec sleep 601' > /dev/null 2>&1 &
sleep $1
"""


@pytest.mark.parametrize(("seconds", "state"), [(600, "CANCELLED"), (1, "COMPLETED")])
def test_no_orphan_outlives_its_job(cluster, tmp_path, seconds, state):
    (tmp_path / "task").write_text(TASK)
    body = f"sh task 0\nsrun sh task {seconds}"  # leaves an orphan of the batch step, then one on each node
    job, _ = submit(cluster, tmp_path, body, "--nodes=2", "--ntasks-per-node=1")

    def orphans(node):
        return [line for line in cluster.processes(node, f"SLURM_JOB_ID={job}\0") if line == "sleep 601"]

    assert until(lambda: len(orphans("node1")) == 2 and len(orphans("node2")) == 1)
    if state == "CANCELLED":
        cluster.cancel(job)
    assert cluster.wait(job, 30)["state"] == state
    assert [cluster.processes(node, f"SLURM_JOB_ID={job}\0") for node in NODES] == [[], []]


def test_a_node_crashes_and_comes_back(cluster, tmp_path):
    job, _ = submit(cluster, tmp_path, "sleep 600", "--nodelist=node2", "--no-requeue")
    assert until(lambda: cluster.processes("node2", f"SLURM_JOB_ID={job}\0"))
    cluster.crash("node2")
    try:
        assert cluster.processes("node2", "") == []
        with pytest.raises(ClusterError, match="node2 is not running"):
            cluster.exec("node2", ["true"])
        assert cluster.wait(job, 40)["state"] == "NODE_FAIL"
    finally:
        cluster.start("node2")
    job, output = submit(cluster, tmp_path, "srun hostname", "--nodes=2")
    assert cluster.wait(job, 20)["state"] == "COMPLETED"
    assert sorted(output.read_text().split()) == list(NODES)
    # its neighbour spoke with it a moment ago, and reaches it at once when it is back
    cluster.crash("node2")
    cluster.start("node2")
    reached = cluster.exec("node1", ["timeout", "5", "bash", "-c", "</dev/tcp/node2/6818"])
    # slurmd may not listen yet: the node itself answers, and nothing is lost on the way to a card that is gone
    assert reached.returncode == 0 or "refused" in reached.stderr, reached


def test_down_leaves_nothing(cluster, tmp_path):
    second = Cluster(f"{cluster.state}b", nodes=1, gpus=0, cpus=4)
    second.up()
    try:
        second.up()  # is up: nothing happens
        job, output = submit(second, tmp_path, "hostname; sleep 600")
        assert until(lambda: output.exists() and output.read_text() == "node1\n")
        assert len(left_of(second.state)) > 5
        with pytest.raises(ClusterError, match="down it first"):
            Cluster(second.state, nodes=2).up()
    finally:
        second.down()
    second.down()  # is down: nothing happens
    assert left_of(second.state) == []
    job, _ = submit(cluster, tmp_path, "true")  # the first cluster has not noticed
    assert cluster.wait(job, 20)["state"] == "COMPLETED"


def test_the_next_up_takes_a_dead_owners_cluster_down(cluster, tmp_path):
    script = (
        "import os, signal, sys; from cluster import Cluster\n"
        "Cluster(sys.argv[1], nodes=1, owner=os.getpid()).up(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    orphan, third = f"{cluster.state}c", Cluster(f"{cluster.state}d", nodes=1)
    folder = Path(module.__file__).parent
    killed = subprocess.run([sys.executable, "-c", script, orphan], cwd=folder, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(left_of(orphan)) > 5
    third.up()
    third.down()
    assert left_of(orphan) == []
    assert cluster.exec("node1", ["hostname"]).stdout == "node1\n"  # its owner lives


def test_a_foreign_directory_is_left_alone(cluster, tmp_path):
    (tmp_path / "precious").touch()
    link = Path(f"{cluster.state}e")
    os.rename(tmp_path, link)
    try:
        with pytest.raises(ClusterError, match="holds other files"):
            Cluster(link).up()
        done = subprocess.run([*COMMAND, "down", "--state", link], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.split(";")[-1]) == (3, " it was left alone\n")
        assert (link / "precious").exists()
    finally:
        os.rename(link, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["up", "--nodes", "0"], 2, "error: --nodes: 0 is out of range; choose from 1 to 250"),
        (["up", "--cpus", "many"], 2, "error: --cpus: invalid int value: 'many'; see --help"),
        (["down", "--state", "/tmp/a b"], 2, "error: --state: '/tmp/a b' is over 60 or odd characters"),
        (["down", "--now"], 2, "error: --now: unknown; see --help"),
        (["exec"], 2, "error: NODE"),
        (["exec", "--state", "/tmp/slurm-none", "node1"], 2, "error: NODE: no 'node1'; choose from: none"),
        (["env", "--state", "/tmp/slurm-none"], 3, "error: env: no cluster in /tmp/slurm-none; run up first"),
        ([], 2, "error: COMMAND: missing; see --help"),
    ],
)
def test_usage_errors_are_one_line(arguments, code, message):
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_command_line(cluster):
    state = ["--state", str(cluster.state)]
    assert "python tests/slurm/cluster.py up" in subprocess.check_output([*COMMAND, "--help"], text=True)
    line = subprocess.check_output([*COMMAND, "env", *state], text=True)
    assert subprocess.check_output(["sh", "-c", f"{line}sinfo -h -o %D"], text=True) == "2\n"
    done = subprocess.run(
        [*COMMAND, "exec", *state, "node2", "sh", "-c", "hostname; exit 5"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (5, "node2\n")
    assert subprocess.check_output([*COMMAND, "up", *state], text=True) == f"up: 2 nodes, {cluster.state}\n"
