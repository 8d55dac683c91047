"""The rendezvous of a job: the port of the first node, whether other nodes reach it, and how long they wait for it.

The first node serves a store through which the ranks learn of each other: torchrun serves it, or rank 0 itself where
there is no torchrun. Nothing large is imported here, so that launch.py can use it.
"""

import contextlib
import os
import socket
import time
import zlib
from pathlib import Path

from shared.errors import ENVIRONMENT, WorkshopError, whole_number

FIRST_PORT = 20000
PORTS = 12000  # Linux gives those from 32768 on to any connection
ATTEMPTS = 200


def port_of(job_id: str, attempt: int = 0) -> int:
    """One that differs from job to job, and is the same for all who ask for it."""
    return FIRST_PORT + (zlib.crc32(job_id.encode()) + attempt) % PORTS


def free_port(job_id: str) -> int:
    """The first one of a job that nobody listens at on this node. Raises WorkshopError (exit code 3)."""
    for attempt in range(ATTEMPTS):
        port = port_of(job_id, attempt)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return port
    what = f"no free port among {ATTEMPTS}"
    raise WorkshopError("MASTER_PORT", what, "end other programs on this node, or exclude it", ENVIRONMENT)


def join_timeout() -> int:
    """Seconds in which all nodes, and all ranks, must have come."""
    return whole_number("JOIN_TIMEOUT", "300")


def first_address() -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT. Raises WorkshopError (exit code 2) where one is missing."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise WorkshopError(name, "is not set, and there are several ranks", "give rank 0's address and a port")
    return os.environ["MASTER_ADDR"], whole_number("MASTER_PORT")


def reach_rank_0() -> None:
    """Return once the store of this job can be reached. Raises WorkshopError (exit code 3)."""
    host, port = first_address()
    served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ["RANK"] != "0" or served_by_torchrun:
        reach("MASTER_ADDR", host, port, join_timeout())
    else:
        note_joining()


def reach(source: str, host: str, port: int, timeout: int) -> None:
    """On the others: wait until the first one listens. Raises WorkshopError (exit code 3)."""
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
            way_out = "check name resolution and firewall between these two nodes"
            raise WorkshopError(source, f"{problem} within {timeout} s", way_out, ENVIRONMENT)
        time.sleep(1)


def note_joining(problem: str = "") -> None:
    """Tell the first node that this node came, or what keeps it: by a file in the job's folder, if there is one."""
    if "RUN_DIR" in os.environ:
        with contextlib.suppress(OSError):  # a full disk must not end the run; an error message may be less exact
            (Path(os.environ["RUN_DIR"]) / f"joining_{node_name()}").write_text(problem)


def missing_nodes() -> list[str]:
    """What is known of each node of the job that has not reached the first one. Of a job of job.sh, else nothing."""
    if "RUN_DIR" not in os.environ:
        return []
    found = []
    for node in os.environ.get("ALL_NODES", "").split():
        noted = Path(os.environ["RUN_DIR"]) / f"joining_{node}"
        problem = noted.read_text() if noted.exists() else f"{node} did not join"
        if problem:
            found.append(problem)
    return found


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
