"""experiments/job.sh on two nodes, with stand-ins for scontrol and srun: the address that they meet at."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import REPOSITORY
from shell import program

# A node whose own address is 10.0.0.2, which stands here in place of the first one's
IP = """case $* in
  "-o address") echo "3: ib0    inet 10.0.0.2/24 brd 10.0.0.255 scope global ib0" ;;
  "-o route get 10.0.0.1") echo "10.0.0.1 dev eth7 src 10.0.0.2 uid 0" ;;
  *) exit 2 ;;
esac"""


@pytest.fixture
def two_nodes(tmp_path):
    """Runs an experiment of two nodes, with stand-ins for Slurm and the network: unknown nodes, this `srun`."""
    programs, folder = tmp_path / "bin", tmp_path / "experiments/mine"
    for path in (programs, folder / "log"):
        path.mkdir(parents=True)

    def run(srun: str = 'printf "> %s\\n" "$@"', lines: str = "", **variables: str) -> subprocess.CompletedProcess:
        (folder / "x.slurm").write_text(f'set -e\nsource "$JOB_SH"\n{lines}\nrun_torchrun train.py --flag\n')
        scontrol = 'if [[ $2 = hostnames ]]; then printf "node1\\nnode2\\n"; fi'
        for name, body in (("scontrol", scontrol), ("srun", srun), ("getent", "echo 127.0.1.1 node2"), ("ip", IP)):
            program(programs, name, body)
        path = f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin"
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_NODE": "4", "SLURM_JOB_NODELIST": "n"}
        environment = {"PATH": path, "HOME": str(tmp_path), "SITE": "laptop", **job, **variables}
        environment["JOB_SH"] = str(REPOSITORY / "experiments/job.sh")
        command = ["bash", "x.slurm"]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)

    return run


def test_torchrun_on_several_nodes_gets_a_static_rendezvous(two_nodes):
    done = two_nodes(MASTER_ADDR="10.0.0.1")
    assert done.returncode == 0, done
    port = re.search(r"rendezvous 10\.0\.0\.1:(\d+)$", done.stdout.splitlines()[0])[1]
    assert 20000 <= int(port) < 32768, "above, Linux gives ports to any connection"
    words = [line.removeprefix("> ") for line in done.stdout.splitlines() if line.startswith("> ")]
    after = words[words.index(str(REPOSITORY / "scripts/launch.py")) + 1 :]
    assert after == [
        *("--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=static", "--rdzv-id=7"),
        *("--master-addr=10.0.0.1", f"--master-port={port}", "train.py", "--flag"),
    ]


def test_a_first_node_without_a_way_to_the_others_ends_the_job(two_nodes, tmp_path):
    done = two_nodes()
    assert done.returncode == 3, done
    assert re.fullmatch(r"error: MASTER_ADDR: \S+ has no address on the way to node2 \(.*\); .*\n", done.stderr)
    assert "missing: no run record: the job ended before the training began" in done.stdout
    assert not list(tmp_path.rglob("results/.*")), "nothing is left of it"


def test_a_slow_network_ends_the_job_before_its_training(two_nodes):
    """measure_bandwidth.py ends with 3: tests/integration."""
    done = two_nodes('[[ "$*" != *measure_bandwidth.py* ]] || exit 3; echo training', lines="check_bandwidth")
    assert done.returncode == 3, done
    assert "training" not in done.stdout.splitlines()
    assert "status: failed (exit code 3)" in done.stdout


@pytest.mark.parametrize(("address", "interface"), [("10.0.0.2", "ib0"), ("10.0.0.1", "eth7"), ("gpu01", None)])
def test_each_node_knows_its_rank_and_the_interface_for_gloo(two_nodes, address, interface):
    """The body of srun: job.sh's part on the second node, with `env` in place of the launcher."""
    body = 'while [[ $1 != bash ]]; do shift; done; SLURM_NODEID=1 "${@:1:3}" env'
    done = two_nodes(body, MASTER_ADDR=address, LOGGERS="no")
    assert done.returncode == 0, done
    expected = {f"GLOO_SOCKET_IFNAME={interface}"} if interface else set()
    assert {line for line in done.stdout.splitlines() if line.startswith("GLOO_SOCKET_IFNAME=")} == expected
    assert "PET_NODE_RANK=1" in done.stdout.splitlines()
