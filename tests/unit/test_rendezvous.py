"""How the nodes of a job find each other: the first node's address, and what launch.py says when they do not."""

import os
import re
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import psutil
import pytest

import launch
from helpers import REPOSITORY
from job import rendezvous
from parallel.distributed import free_port

LAUNCH = [sys.executable, str(REPOSITORY / "scripts/launch.py")]


# rendezvous.py


class Route:
    """A socket of a machine on which each target is reached from another address of its own."""

    own = {"10.0.0.2": "10.0.0.1", "fd00::2": "fd00::1", "fe80::2": "fe80::1", "127.0.1.1": "127.0.0.1", "::1": "::1"}

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def connect(self, address):
        if address[0] not in self.own:
            raise OSError("no route")
        self.target = address[0]

    def getsockname(self):
        return (self.own[self.target], 40000)


@pytest.mark.parametrize(
    ("resolved", "address"),
    [
        (["10.0.0.2"], "10.0.0.1"),
        (["fd00::2", "10.0.0.2"], "10.0.0.1"),
        (["fd00::2"], "fd00::1"),
        (["127.0.1.1", "10.0.0.2"], "10.0.0.1"),
        (["127.0.1.1"], ""),
        (["::1", "fe80::2"], ""),
        (["10.9.9.9", "fd00::2"], "fd00::1"),
        (["10.9.9.9"], ""),
    ],
    ids=["IPv4", "IPv4 first", "IPv6 only", "not loopback", "only loopback", "nothing usable", "no route", "no way"],
)
def test_own_address_is_the_one_on_the_way_to_another_node(monkeypatch, resolved, address):
    def entry(found):
        return (socket.AF_INET6 if ":" in found else socket.AF_INET, socket.SOCK_DGRAM, 17, "", (found, 9))

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry(found) for found in resolved])
    monkeypatch.setattr(socket, "socket", Route)
    assert rendezvous.address_towards("node2") == address


def test_a_name_without_an_address_leads_nowhere():
    assert rendezvous.address_towards("") == ""
    assert rendezvous.address_towards("no-such-node.invalid") == ""


def test_slurms_address_of_a_node_goes_before_its_name(monkeypatch):
    slurm, ways = {"node2": "10.0.0.2", "node3": ""}, {"10.0.0.2": "10.0.0.1", "node2": "10.1.0.1", "node3": "10.3.0.1"}
    monkeypatch.setattr(rendezvous, "slurm_address", slurm.get)
    monkeypatch.setattr(rendezvous, "address_towards", lambda target: ways.get(target, ""))
    assert rendezvous.first_node_address(["node2", "node3"]) == "10.0.0.1"
    del ways["10.0.0.2"]
    assert rendezvous.first_node_address(["node2", "node3"]) == "10.1.0.1"
    del ways["node2"]
    assert rendezvous.first_node_address(["node2", "node3"]) == "10.3.0.1"
    ways.clear()
    assert rendezvous.first_node_address(["node2", "node3"]) == ""


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
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n[ \"$*\" = 'show node node2' ] && echo '{answer}'\n")
        (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if answer else str(tmp_path))
    assert rendezvous.slurm_address("node2") == address


def test_the_interface_is_the_one_with_that_address(monkeypatch):
    found = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.168.0.7", "fd00::7"], "ib0": ["10.0.0.1"]}
    found = {name: [Namespace(address=address) for address in addresses] for name, addresses in found.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    for own, name in (("10.0.0.1", "ib0"), ("fd00::7", "eth0"), ("172.16.0.1", ""), ("", "")):
        monkeypatch.setattr(rendezvous, "address_towards", lambda _, own=own: own)
        assert rendezvous.interface_towards("10.0.0.1") == name


# job.sh


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
            (programs / name).write_text(f"#!/bin/bash\n{body}\n")
            (programs / name).chmod(0o755)
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


def test_a_first_node_without_an_address_for_the_others_ends_the_job(two_nodes):
    done = two_nodes("127.0.1.1")
    assert done.returncode == 3, done
    assert re.fullmatch(r"error: MASTER_ADDR: \S+ has no address but loopback on the way to node2; .*\n", done.stderr)
    assert done.stdout == ""


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


# launch.py


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


def test_the_time_out_is_that_of_the_static_rendezvous(monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "run", seen.append)
    monkeypatch.setenv("JOIN_TIMEOUT", "7")
    flags = ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "x.py"]
    monkeypatch.setattr(sys, "argv", ["launch.py", *flags])
    launch.main()
    assert seen[0].rdzv_conf == "timeout=7"
