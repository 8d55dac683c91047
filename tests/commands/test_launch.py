"""launch.py as the nodes of a job start it: they meet, or it is said which one did not come, and why."""

import os
import re
import socket
import subprocess
import sys

import pytest

from helpers import REPOSITORY
from parallel.distributed import free_port

LAUNCH = [sys.executable, str(REPOSITORY / "scripts/launch.py")]


@pytest.fixture
def start(tmp_path):
    """Starts launch.py as a node of a job of two, `first` and `second`; all are ended with the test."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    # print would write a line in pieces, and those of two ranks could mix
    (tmp_path / "x.py").write_text(
        f"import os\nline = ' '.join(os.environ[name] for name in {names})\nos.write(1, f'{{line}}\\n'.encode())\n"
    )
    started = []

    def run(node_rank: int, port: int, address: str = "127.0.0.1", timeout: int = 100) -> subprocess.Popen:
        flags = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=static", f"--node-rank={node_rank}"]
        flags += [f"--master-addr={address}", f"--master-port={port}"]
        variables = {"RUN_DIR": str(tmp_path), "ALL_NODES": "first\nsecond", "JOIN_TIMEOUT": str(timeout)}
        variables |= {"SLURMD_NODENAME": ("first", "second")[node_rank], "OMP_NUM_THREADS": "1"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [*LAUNCH, *flags, str(tmp_path / "x.py")]
        started.append(subprocess.Popen(command, env=os.environ | variables, **streams))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def error_of(process: subprocess.Popen) -> str:
    """What launch.py writes when it ends with exit code 3: this line and nothing else."""
    out, error = process.communicate(timeout=120)
    assert (process.returncode, out) == (3, ""), error
    assert re.fullmatch(r"error: rendezvous: .*; .*\n", error)
    return error


def test_two_nodes_meet_at_the_address_that_is_given(start):
    port = free_port()
    nodes = [start(1, port), start(0, port)]
    lines = [line for node in nodes for line in node.communicate(timeout=120)[0].splitlines()]
    assert [node.returncode for node in nodes] == [0, 0]
    assert sorted(lines) == [f"{rank} 4 127.0.0.1 {port}" for rank in range(4)]


def test_a_node_that_does_not_come_is_named(start):
    assert error_of(start(0, free_port(), timeout=1)).startswith("error: rendezvous: second did not join within 1 s; ")


def test_a_node_that_cannot_reach_the_first_says_why_and_leaves_it_for_the_first(start):
    port = free_port()
    problem = f"second cannot reach 127.0.0.1:{port} ([Errno 111] Connection refused) within 1 s; "
    assert error_of(start(1, port, timeout=1)).startswith(f"error: rendezvous: {problem}")
    assert error_of(start(0, port, timeout=1)).startswith(f"error: rendezvous: {problem}")


@pytest.mark.parametrize("address", ["203.0.113.1", "no-such-node.invalid", "127.0.0.1"])
def test_a_first_node_that_cannot_listen_says_so_at_once(start, address):
    """RFC 5737 gives the first address to nobody; at the last one the port is taken."""
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        error = error_of(start(0, port, address, timeout=10_000))
    assert error.startswith(f"error: rendezvous: first cannot listen at {address}:{port} (")
