"""experiments/job.sh on two nodes, with stand-ins for scontrol and srun: the address that they meet at."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import REPOSITORY
from job import rendezvous
from shell import program


@pytest.mark.parametrize(
    ("answer", "address"),
    [
        ("NodeName=node2 Arch=x86_64\n   NodeAddr=10.0.0.2 NodeHostName=node2 Version=22.05", "10.0.0.2"),
        ("slurm_load_node error: Invalid node name specified", ""),
        (None, ""),
    ],
    ids=["shown", "hidden", "no scontrol"],
)
def test_slurms_address_of_a_node(monkeypatch, tmp_path, answer, address):
    if answer:
        program(tmp_path, "scontrol", f"[ \"$*\" = 'show node node2' ] && echo '{answer}'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if answer else str(tmp_path))
    assert rendezvous.slurm_address("node2") == address


@pytest.fixture
def two_nodes(tmp_path):
    """Runs an experiment of two nodes, with stand-ins: a Slurm whose nodes have this address, and this `srun`."""
    programs, folder = tmp_path / "bin", tmp_path / "experiments/mine"
    for path in (programs, folder / "log"):
        path.mkdir(parents=True)
    (folder / "x.slurm").write_text('source "$JOB_SH"\nrun_torchrun train.py --flag\n')

    def run(node_address: str, srun: str = 'printf "> %s\\n" "$@"', **variables: str) -> subprocess.CompletedProcess:
        scontrol = f'[[ $2 = hostnames ]] && printf "node1\\nnode2\\n" || echo "   NodeAddr={node_address} Version=1"'
        for name, body in (("scontrol", scontrol), ("srun", srun)):
            program(programs, name, body)
        path = f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin"
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_NODE": "4", "SLURM_JOB_NODELIST": "n"}
        environment = {"PATH": path, "HOME": str(tmp_path), "SITE": "laptop", **job, **variables}
        environment["JOB_SH"] = str(REPOSITORY / "experiments/job.sh")
        command = ["bash", "x.slurm"]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)

    return run


def test_torchrun_on_several_nodes_gets_a_static_rendezvous(two_nodes):
    done = two_nodes("127.0.0.1", MASTER_ADDR="10.0.0.1")
    assert done.returncode == 0, done
    port = re.search(r"rendezvous 10\.0\.0\.1:(\d+)$", done.stdout.splitlines()[0])[1]
    assert 20000 <= int(port) < 32768, "above, Linux gives ports to any connection"
    words = [line.removeprefix("> ") for line in done.stdout.splitlines() if line.startswith("> ")]
    after = words[words.index(str(REPOSITORY / "scripts/launch.py")) + 1 :]
    assert after == [
        *("--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=static", "--rdzv-id=7"),
        *("--master-addr=10.0.0.1", f"--master-port={port}", "train.py", "--flag"),
    ]


def test_a_first_node_without_an_address_for_the_others_ends_the_job(two_nodes, tmp_path):
    done = two_nodes("127.0.1.1")
    assert done.returncode == 3, done
    assert re.fullmatch(r"error: MASTER_ADDR: \S+ has no address but loopback on the way to node2; .*\n", done.stderr)
    assert "missing: no run record: the job ended before the training began" in done.stdout
    assert not list(tmp_path.rglob("results/.*")), "nothing is left of it"


def test_each_node_knows_its_rank_and_the_interface_for_gloo(two_nodes):
    """The body of srun: job.sh's part on the second node, with `env` in place of the launcher."""
    body = 'while [[ $1 != bash ]]; do shift; done; SLURM_NODEID=1 "${@:1:3}" env'
    here = rendezvous.address_towards("192.0.2.1")  # RFC 5737: nobody's
    done = two_nodes("", body, MASTER_ADDR=here or "127.0.0.1", LOGGERS="no")
    assert done.returncode == 0, done
    expected = {f"GLOO_SOCKET_IFNAME={rendezvous.interface_towards(here)}"} if here else set()
    assert {line for line in done.stdout.splitlines() if line.startswith("GLOO_SOCKET_IFNAME=")} == expected
    assert "PET_NODE_RANK=1" in done.stdout.splitlines()
    done = two_nodes("", body, MASTER_ADDR="127.0.0.1", LOGGERS="no", GLOO_SOCKET_IFNAME="ib0")
    assert "GLOO_SOCKET_IFNAME=ib0" in done.stdout.splitlines(), "the site's choice"
