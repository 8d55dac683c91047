"""torchrun, with the exit status of the rank that failed first, and the name of a node that is missing.

    python scripts/launch.py --nproc-per-node=2 scripts/train.py --deepspeed ds_configs/zero2.json

All arguments are torchrun's. torchrun itself ends with 1 whatever happened, behind a page of traceback; a
job's exit status should say what the training said.
"""

import os
import socket
import sys
import time
from pathlib import Path

from errors import ENVIRONMENT, fail
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

JOIN_TIMEOUT = os.environ.get("JOIN_TIMEOUT") or "300"  # seconds
if not JOIN_TIMEOUT.isdecimal():
    fail("JOIN_TIMEOUT", f"{JOIN_TIMEOUT!r} is no number of seconds", "give a whole number, for example 300")


def main() -> None:
    if "--help" in sys.argv[1:2]:
        print(__doc__)
    arguments = parse_args(sys.argv[1:])
    arguments.rdzv_conf = f"join_timeout={JOIN_TIMEOUT},{arguments.rdzv_conf}".rstrip(",")
    if arguments.nnodes.split(":")[-1] != "1":
        reach_head_node(arguments.rdzv_endpoint)
    try:
        run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode  # -9: killed by signal 9
        print(f"rank {rank} on {socket.gethostname()} ended first, with exit code {code}", file=sys.stderr)
        sys.exit(code)
    except SignalException as signal:
        sys.exit(128 + signal.sigval)
    except RendezvousError as error:
        what = f"{', '.join(missing_nodes()) or 'some node'} did not join within {JOIN_TIMEOUT} s"
        fail("rendezvous", f"{what} ({error})", "check that node and its network, then exclude it", ENVIRONMENT)


def reach_head_node(endpoint: str) -> None:
    """Wait until the head node listens; then note that this node has come that far."""
    host, port = endpoint.rsplit(":", 1)
    deadline, problem = time.monotonic() + int(JOIN_TIMEOUT), None
    while os.environ.get("SLURM_NODEID", "0") != "0":
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            break
        except OSError as error:
            problem = error
        if time.monotonic() > deadline:
            what = f"{socket.gethostname()} cannot reach {endpoint} ({problem}), tried for {JOIN_TIMEOUT} s"
            way_out = "check name resolution and firewall between these two nodes"
            fail("rendezvous", what, way_out, ENVIRONMENT)
        time.sleep(1)
    if "RUN_DIR" in os.environ:
        (Path(os.environ["RUN_DIR"]) / f"joined_{node_name()}").touch()


def missing_nodes() -> list[str]:
    """Nodes of the job that never reached the head node."""
    nodes, run_dir = os.environ.get("ALL_NODES", "").split(), os.environ.get("RUN_DIR")
    return [node for node in nodes if run_dir and not (Path(run_dir) / f"joined_{node}").exists()]


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


if __name__ == "__main__":
    main()
