"""How nodes and ranks find the first of them: where it listens, whether it can be reached, how long they wait for it.

The first one serves a store through which the others learn of each other: torchrun on the first node, or rank 0 itself
where there is no torchrun. Nothing large is imported here, so that launch.py can use it.
"""

import os
import socket
import time
from collections.abc import Callable

from errors import ENVIRONMENT, WorkshopError


def join_timeout() -> int:
    """Seconds in which all nodes, and all ranks, must have come."""
    text = os.environ.get("JOIN_TIMEOUT") or "300"
    if not text.isdecimal() or len(text) > 6:
        what = f"{text[:20]!r} is no number of seconds"
        raise WorkshopError("JOIN_TIMEOUT", what, "give a whole number, for example 300")
    return int(text)


def first_address() -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT. Raises WorkshopError (exit code 2) where they are no address or missing."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise WorkshopError(name, "is not set, and there are several ranks", "give rank 0's address and a port")
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 2**16:
        raise WorkshopError("MASTER_PORT", f"{port[:20]!r} is no port", "give a number from 1 to 65535")
    return os.environ["MASTER_ADDR"], int(port)


def torchrun_serves_the_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def reach_rank_0() -> None:
    """Return once the store of this job can be reached, or can be opened here. Raises WorkshopError (exit code 3)."""
    host, port = first_address()
    if os.environ["RANK"] == "0" and not torchrun_serves_the_store():
        listen_at("MASTER_ADDR", host, port).close()
    else:
        reach("MASTER_ADDR", host, port, join_timeout())


def listen_at(source: str, host: str, port: int) -> socket.socket:
    """On the first: a socket of its own, as the store would open it; where it cannot, that prints a page of C++ frames.

    Raises WorkshopError (exit code 3) that names `source`.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except (OSError, UnicodeError) as error:
        reason = str(error).partition(" (while")[0]  # the rest is the address once more
        what = f"{node_name()} cannot listen at {host}:{port} ({reason})"
        raise WorkshopError(
            source, what, "give MASTER_ADDR an address of the first node, or submit again", ENVIRONMENT
        ) from error


def reach(source: str, host: str, port: int, timeout: int, note: Callable[[str], None] = lambda problem: None) -> None:
    """On the others: wait until the first one listens. note: is told what the problem is, when it is a new one."""
    deadline = time.monotonic() + timeout
    noted = ""
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except (OSError, UnicodeError) as error:
            problem = f"{node_name()} cannot reach {host}:{port} ({error})"
        if problem != noted:
            noted = problem
            note(problem)
        if time.monotonic() > deadline:
            way_out = "check name resolution and firewall between these two nodes"
            raise WorkshopError(source, f"{problem} within {timeout} s", way_out, ENVIRONMENT)
        time.sleep(1)


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
