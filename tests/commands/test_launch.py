"""Tests of launch.py on the nodes of a job: the nodes meet, or an error names the missing node and the reason.

launch.py must not execute code that another user writes into the store of the rendezvous.
"""

import base64
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from helpers import LIMIT, REPOSITORY, free_port, until

LAUNCH = [sys.executable, str(REPOSITORY / "scripts/launch.py")]


@pytest.fixture
def start(tmp_path):
    """Start launch.py as node `first` or `second` of a job with two nodes; both end with the test."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    # print writes a line in pieces, which could mix with the pieces of another rank
    line = f"line = ' '.join(os.environ[name] for name in {names})\nos.write(1, f'{{line}}\\n'.encode())"
    ran = f"open(os.path.join({str(tmp_path)!r}, 'ran_' + os.environ['RANK']), 'w')"
    (tmp_path / "x.py").write_text(f"import os\n{line}\n{ran}\n")
    started = []

    def run(node_rank: int, port: int, timeout: int = 100, launch: list[str] = LAUNCH) -> subprocess.Popen:
        flags = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=static", f"--node-rank={node_rank}"]
        flags += ["--master-addr=127.0.0.1", f"--master-port={port}"]
        variables = {"RUN_DIR": str(tmp_path), "ALL_NODES": "first\nsecond", "JOIN_TIMEOUT": str(timeout)}
        variables |= {"SLURMD_NODENAME": ("first", "second")[node_rank], "OMP_NUM_THREADS": "1"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [*launch, *flags, str(tmp_path / "x.py")]
        started.append(subprocess.Popen(command, env=os.environ | variables, **streams))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def read_error(process: subprocess.Popen) -> str:
    """Return the error line of a launch.py that must end with exit code 3 and print nothing else."""
    out, error = process.communicate(timeout=120)
    assert (process.returncode, out) == (3, ""), error
    assert re.fullmatch(r"error: rendezvous: .*; .*\n", error)
    return error


# Start launch.py so that this node takes a second longer after it has joined a barrier of the store
SLOW = """
import runpy, sys, time
sys.path.insert(0, {scripts!r})
from torch.distributed.elastic.utils import store as store_util
plain = store_util._barrier_nonblocking
def slow(*arguments, **keywords):
    key = plain(*arguments, **keywords)
    time.sleep(1)
    return key
store_util._barrier_nonblocking = slow
runpy.run_path({scripts!r} + "/launch.py", run_name="__main__")
"""


def test_two_nodes_meet_at_the_given_address_and_the_first_leaves_last(start, tmp_path):
    """torchrun on the first node holds the store; torchrun on the second node fails if the store ends first.

    Also, signals after the end of the ranks do not change the exit code.
    """
    port = free_port()
    slow = [sys.executable, "-c", SLOW.format(scripts=str(REPOSITORY / "scripts"))]
    nodes = [start(1, port, launch=slow), start(0, port)]
    processes = [psutil.Process(node.pid) for node in nodes]
    until(lambda: len([*tmp_path.glob("ran_*")]) == 4 and not any(each.children() for each in processes))
    until(lambda: None not in [node.send_signal(signal.SIGTERM) or node.poll() for node in nodes], pause=0.1)
    lines, errors = zip(*[node.communicate(timeout=120) for node in nodes], strict=True)
    assert ([node.returncode for node in nodes], errors) == ([0, 0], ("", ""))
    assert sorted("".join(lines).splitlines()) == [f"{rank} 4 127.0.0.1 {port}" for rank in range(4)]


def test_an_unreachable_first_node_is_reported_on_both_nodes(start):
    port = free_port()
    problem = f"second cannot reach 127.0.0.1:{port} ([Errno 111] Connection refused) within 1 s; "
    assert read_error(start(1, port, timeout=1)).startswith(f"error: rendezvous: {problem}")
    assert read_error(start(0, port, timeout=1)).startswith(f"error: rendezvous: {problem}")


def test_a_signal_ends_nodes_that_wait_for_another_node_at_once(start, tmp_path):
    """The first node waits in its store; the second waits for another first node, which does not listen."""
    nodes = [start(0, free_port(), timeout=300), start(1, free_port(), timeout=300)]
    store = psutil.Process(nodes[0].pid).net_connections
    until(lambda: (tmp_path / "joining_second").exists() and "LISTEN" in [each.status for each in store()])
    for node in nodes:
        node.send_signal(signal.SIGINT)
    assert [(*node.communicate(timeout=LIMIT), node.returncode) for node in nodes] == [("", "", 130)] * 2


# An attack: another user of the network writes code into the store of a running launch

MEETS_AND_WAITS = """
import os, pathlib, time
import torch.distributed as dist
dist.init_process_group("gloo")
pathlib.Path(f"joined_{dist.get_rank()}").touch()
while not os.path.exists("go"):
    time.sleep(0.05)
"""


class Touch:
    """An object that creates a file when it is unpickled, in place of harmful code."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def write_pickles(port: int, path: Path) -> None:
    """Replace every value of the store, and the state of a c10d rendezvous, by a pickle that creates `path`."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    pickled = base64.b64encode(pickle.dumps(Touch(path)))
    for key in {*store.list_keys(), "torch.rendezvous.7", "torch.rendezvous.none"}:
        store.set(key, pickled)


@pytest.mark.promise("the store of a job executes nothing")
def test_launch_py_executes_nothing_from_the_store(tmp_path):
    """A c10d rendezvous, which launch.py refuses, would execute the pickles."""
    (tmp_path / "waits.py").write_text(MEETS_AND_WAITS)
    port = free_port()
    command = [*LAUNCH, f"--master-port={port}", "--nproc-per-node=2", "waits.py"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launcher = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet)
    try:
        until(lambda: len(list(tmp_path.glob("joined_*"))) == 2)
        write_pickles(port, tmp_path / "executed")
    finally:
        (tmp_path / "go").touch()
        launcher.wait(timeout=120)
    assert not (tmp_path / "executed").exists()


# A rank that records SIGINT and keeps running. A rank in a collective also keeps running, because Python runs no
# signal handler during a collective.
UNRESPONSIVE = """
import os
import signal
from pathlib import Path

note = Path(f"rank_{os.environ['RANK']}")
signal.signal(signal.SIGINT, lambda *_: note.write_text("told"))
note.write_text(os.environ["OMP_NUM_THREADS"])
while True:
    signal.pause()
"""


@pytest.mark.promise("reliability 3")
def test_a_second_ctrl_c_kills_unresponsive_ranks(tmp_path):
    """Also, launch.py sets OMP_NUM_THREADS of each rank to the rank's share of the cores."""
    (tmp_path / "unresponsive.py").write_text(UNRESPONSIVE)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [*LAUNCH, "--nproc-per-node=2", "unresponsive.py"]
    notes = [tmp_path / "rank_0", tmp_path / "rank_1"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **streams)
    try:
        for noted in (str(max(1, len(os.sched_getaffinity(0)) // 2)), "told"):
            until(lambda noted=noted: all(note.exists() and note.read_text() == noted for note in notes))
            process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
    assert process.returncode == 137, said
    assert "OMP_NUM_THREADS" not in said, "torchrun warns when it has to choose a value"
