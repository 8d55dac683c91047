"""Tests of experiments/job.sh on two nodes, with stubs for scontrol and srun. tests/slurm uses the real programs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import REPOSITORY, the_error
from records.schema import read_attempts
from shell import program


@pytest.fixture
def two_nodes(tmp_path):
    """Run an experiment on two nodes with stubs for Slurm's programs. `srun` holds the bash lines of srun."""
    programs, folder = tmp_path / "bin", tmp_path / "experiments/mine"
    for path in (programs, folder / "log"):
        path.mkdir(parents=True)

    def run(srun: str = 'printf "> %s\\n" "$@"', lines: str = "", **variables: str) -> subprocess.CompletedProcess:
        (folder / "x.slurm").write_text(
            f'#SBATCH --nodes=2\nset -e\nsource "$JOB_SH"\n{lines}\nrun_torchrun train.py --flag\n'
        )
        scontrol = 'if [[ $2 = hostnames ]]; then printf "node1\\nnode2\\n"; fi'
        for name, body in (
            ("scontrol", scontrol),
            ("srun", srun),
            ("getent", "echo 127.0.1.1 node2"),
        ):
            program(programs, name, body)
        path = f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin"
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_NODE": "4", "SLURM_JOB_NODELIST": "n"}
        here = {"PATH": path, "HOME": str(tmp_path), "SITE": "laptop", "SLURMD_NODENAME": "node1"}
        environment = here | job | variables
        environment["JOB_SH"] = str(REPOSITORY / "experiments/job.sh")
        command = ["bash", "x.slurm"]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)

    return run


def test_torchrun_on_several_nodes_gets_a_static_rendezvous(two_nodes):
    done = two_nodes(MASTER_ADDR="10.0.0.1")
    assert done.returncode == 0, done
    port = re.search(r"rendezvous 10\.0\.0\.1:(\d+)$", done.stdout.splitlines()[0])[1]
    assert 20000 <= int(port) < 32768, "Linux gives the ports above to any connection"
    words = [line.removeprefix("> ") for line in done.stdout.splitlines() if line.startswith("> ")]
    assert "--kill-on-bad-exit=1" in words, "one failed rank must end the others"
    after = words[words.index(str(REPOSITORY / "scripts/launch.py")) + 1 :]
    assert after == [
        *("--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=static", "--rdzv-id=7"),
        *("--master-addr=10.0.0.1", f"--master-port={port}", "train.py", "--flag"),
    ]


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_shell_off_the_first_node_gets_an_error_with_the_solution(two_nodes, nodes):
    """The shell of salloc runs on the login node, where SLURMD_NODENAME is not set."""
    salloc = {"SLURM_JOB_NUM_NODES": nodes, "SLURMD_NODENAME": "", "MASTER_ADDR": "10.0.0.1"}
    done = two_nodes(**salloc)
    assert (done.returncode, done.stdout) == (3, "")
    remedy = r"open a shell there \(srun --overlap --nodes=1 --ntasks=1 --pty bash\), or submit it with sbatch"
    what = f"it must run on node1, the first node of job 7, and this shell is on {os.uname().nodename}"
    assert re.fullmatch(rf"error: x\.slurm: {what}; {remedy}\n", done.stderr)
    on_node1 = salloc | {"SLURMD_NODENAME": "node1.workshop.test"}
    assert two_nodes(lines="run_python -c pass; exit", **on_node1).returncode == 0


@pytest.mark.parametrize(
    ("line", "code", "lines", "variables"),
    [
        ("rendezvous: node2 did not join within 1 s; ", 3, "", {"JOIN_TIMEOUT": "1"}),
        ("--min_bandwidth: invalid number value: 'fast'; ", 2, "check_bandwidth", {"MIN_BANDWIDTH": "fast"}),
    ],
)
def test_the_error_line_of_a_process_is_the_reason(two_nodes, tmp_path, line, code, lines, variables):
    """Only the first node's task runs: a launcher whose other node never joins, or a rank of the bandwidth test.

    After a bandwidth test that fails, there is no training. tests/integration runs the test on a slow network.
    """
    first = 'while [[ ${1##*/} != python* ]]; do shift; done; SLURM_NODEID=0 "$@"'
    done = two_nodes(first, lines, MASTER_ADDR="127.0.0.1", LOGGERS="no", **variables)
    assert done.returncode == code, done
    (attempt,) = read_attempts(tmp_path / "experiments/mine/results/7.json")
    assert the_error(done.stderr) == f"error: {attempt.reason}"
    assert attempt.reason.startswith(line) and attempt.reason in done.stdout.splitlines()


# Run the command of each task, as Slurm does on two nodes. The file `second_ended` says that the second task has ended
BOTH_NODES = """
while [[ ${1##*/} != python* ]]; do shift; done
SLURM_PROCID=0 SLURM_NODEID=0 SLURMD_NODENAME=node1 "$@" &
SLURM_PROCID=1 SLURM_NODEID=1 SLURMD_NODENAME=node2 "$@" || touch second_ended
wait $!
"""
# Rank 1 fails next to rank 0, which does not react to SIGTERM. Then the ranks of the other node fail
FAILING_RANKS = f"""
import os, pathlib, signal, sys, time

def wait_for(file):
    while not os.path.exists(file):
        time.sleep(0.05)

rank = int(os.environ["RANK"])
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path("ready").touch()
    wait_for("second_ended")
elif rank == 1:
    wait_for("ready")
    pathlib.Path("ended").touch()
    raise SystemExit(3)
else:
    sys.path.insert(0, {str(REPOSITORY / "scripts")!r})
    from distributed.process_group import run_and_exit

    def lose_rank_1():
        wait_for("ended")
        raise RuntimeError("Connection closed by peer")

    run_and_exit(lose_rank_1)
"""


def test_the_rank_that_failed_first_decides_although_its_launcher_waits_for_another_rank(two_nodes, tmp_path):
    (tmp_path / "experiments/mine/train.py").write_text(FAILING_RANKS)
    done = two_nodes(BOTH_NODES, MASTER_ADDR="127.0.0.1", LOGGERS="no", SLURM_GPUS_PER_NODE="2")
    assert done.returncode == 3, done
    assert "rank 1 on node1 ended first, with exit code 3" in done.stdout.splitlines()


def test_each_node_gets_its_rank_and_keeps_the_network_interface(two_nodes):
    """The stub for srun runs on_node.py as on the second node, with `env` in place of the launcher."""
    body = 'while [[ ${1##*/} != python* ]]; do shift; done; SLURM_NODEID=1 "${@:1:3}" env'
    done = two_nodes(body, MASTER_ADDR="10.0.0.1", LOGGERS="no", GLOO_SOCKET_IFNAME="eth0")
    assert done.returncode == 0, done
    assert {"PET_NODE_RANK=1", "GLOO_SOCKET_IFNAME=eth0"} <= set(done.stdout.splitlines())
