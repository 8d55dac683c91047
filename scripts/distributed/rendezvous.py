"""The rendezvous of a job: the address and port where all nodes meet, and the wait until a node can connect.

The ranks exchange their addresses through a store on the first node. torchrun runs the store; without torchrun, rank 0
does. This module imports no large package, so that launch.py and run_job.py can use it.
"""

import contextlib
import os
import socket
import time
import zlib
from pathlib import Path

from shared.errors import ENVIRONMENT, WorkshopError, whole_number

FIRST_PORT = 20000
PORTS = 12000  # Linux assigns the ports from 32768 on to outgoing connections
ATTEMPTS = 200


def job_port(job_id: str, attempt: int = 0) -> int:
    """Return the port of a job: the same on all nodes, and most likely another one for each job."""
    return FIRST_PORT + (zlib.crc32(job_id.encode()) + attempt) % PORTS


def free_port(job_id: str) -> int:
    """Return the job's first port that is free on this node.

    Raises WorkshopError (exit code 3) if none is free.
    """
    for attempt in range(ATTEMPTS):
        port = job_port(job_id, attempt)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return port
    what = f"no free port among {ATTEMPTS}"
    raise WorkshopError("MASTER_PORT", what, "end other programs on this node, or exclude it", ENVIRONMENT)


def join_timeout() -> int:
    """Return the seconds within which all nodes and ranks must join."""
    return whole_number("JOIN_TIMEOUT", "300")


def first_address() -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT. Raises WorkshopError (exit code 2) if one is missing."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise WorkshopError(name, "is not set, and there are several ranks", "give rank 0's address and a port")
    return os.environ["MASTER_ADDR"], whole_number("MASTER_PORT")


def reach_rank_0() -> None:
    """Wait until this rank can connect to the job's store. Rank 0 does not wait if it runs the store itself.

    Raises WorkshopError (exit code 3) after JOIN_TIMEOUT seconds.
    """
    host, port = first_address()
    served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ["RANK"] != "0" or served_by_torchrun:
        reach("MASTER_ADDR", host, port, join_timeout())
    else:
        note_joining()


def reach(source: str, host: str, port: int, timeout: int) -> None:
    """Wait until a process listens at this address. Raises WorkshopError (exit code 3) after `timeout` seconds.

    source: the variable that the error names.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            note_joining()
            return
        except OSError as error:
            problem = f"{node_name()} cannot reach {host}:{port} ({error})"
        note_joining(problem)
        if time.monotonic() > deadline:
            remedy = "check name resolution and firewall between these two nodes"
            raise WorkshopError(source, f"{problem} within {timeout} s", remedy, ENVIRONMENT)
        time.sleep(1)


def note_joining(problem: str = "") -> None:
    """Write a note into the job's folder: this node has joined, or `problem` prevents it.

    The first node reads these notes. Without a job there is no such folder, and nothing is written.
    """
    if "RUN_DIR" in os.environ:
        with contextlib.suppress(OSError):  # a full disk must not end the run; it only makes a message less exact
            (Path(os.environ["RUN_DIR"]) / f"joining_{node_name()}").write_text(problem)


def missing_nodes() -> list[str]:
    """Return one line per node that has not joined, with its problem if the node has noted one.

    The list is empty without run_job.py, which creates the folder with the notes.
    """
    if "RUN_DIR" not in os.environ:
        return []
    notes = {node: Path(os.environ["RUN_DIR"], f"joining_{node}") for node in os.environ.get("ALL_NODES", "").split()}
    problems = [note.read_text() if note.exists() else f"{node} did not join" for node, note in notes.items()]
    return [problem for problem in problems if problem]


def node_name() -> str:
    """Return the name of this node in Slurm. Without Slurm, return its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
