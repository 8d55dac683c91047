"""Start the ranks of a training run on one node: torchrun, with clean stops and a safe rendezvous.

    python scripts/launch.py --nproc-per-node=2 scripts/train.py --deepspeed ds_configs/zero2.json

All arguments are torchrun's, and torchrun does the work. The differences are:
  - torchrun kills its ranks 30 seconds after a signal, but saving a checkpoint may take minutes. launch.py passes the
    signal on and waits until the ranks end. After a second Ctrl-C it kills them.
  - After any failure, torchrun prints a page of traceback and ends with exit code 1. launch.py ends with the exit code
    of the rank that failed first.
  - On one node, torchrun uses the c10d rendezvous, which executes code that anybody on the network writes into its
    store. launch.py always uses the static rendezvous, which reads text. It names each node that does not join within
    JOIN_TIMEOUT seconds.
"""

import argparse
import contextlib
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
from torch.distributed import DistError, Store
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as static
from torch.distributed.elastic.utils import store as store_util
from torch.distributed.run import parse_args, parse_min_max_nnodes, run

from distributed.rendezvous import free_port, join_timeout, missing_nodes, node_name, note_joining, reach
from job import on_node
from shared.errors import ENVIRONMENT, STOPPED, WorkshopError, note_end, run_program

LOOPBACK = "127.0.0.1"
SECONDS_BEFORE_KILL = 5  # time between a second Ctrl-C and SIGKILL, in which ranks may end by themselves


def main() -> None:
    if "--help" in sys.argv[1:2]:
        print(__doc__)
    arguments = parse_args(sys.argv[1:])
    started: list[Any] = []  # the ranks, in one object of torchrun
    on_node.handle_signals(partial(pass_signal_to_ranks, started, []))
    arguments.signals_to_handle = "SIGQUIT"  # the only signal that torchrun still handles itself
    share_cores(arguments.nproc_per_node)
    prepare_rendezvous(arguments, join_timeout())
    failed_at: list[int] = []  # nanoseconds
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(partial(note_failure, failed_at))
    static.TCPStore = partial(join_nodes, static.TCPStore)  # type: ignore[assignment, misc]
    local_elastic_agent.start_processes = partial(start_ranks, started, local_elastic_agent.start_processes)
    store_util.barrier = partial(final_barrier, arguments.node_rank, store_util.barrier)
    try:
        # Use the job's folder if there is one: run_job.py removes it even if this launcher is killed
        run_dir = os.environ.get("RUN_DIR")
        with tempfile.TemporaryDirectory(prefix="launch_", dir=run_dir, ignore_cleanup_errors=True) as folder:
            arguments.log_dir = arguments.log_dir or folder  # otherwise torchrun leaves a temporary folder
            run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code <= 0:  # -9: killed by signal 9
            code = 128 - code
        if "RUN_DIR" in os.environ:  # a rank of another node may have ended earlier, so end_of_job.py reports
            note_end(code, f"rank {rank} on {node_name()}", min(failed_at, default=None))
        elif code != STOPPED:
            print(f"rank {rank} on {node_name()} ended first, with exit code {code}", file=sys.stderr)
        sys.exit(code)
    except DistError as error:
        missing = ", ".join(missing_nodes())
        what = f"{missing} within {join_timeout()} s" if missing else f"the nodes could not connect ({error})"
        remedy = "check that node, its name resolution and its firewall, or exclude the node"
        raise WorkshopError("rendezvous", what, remedy, ENVIRONMENT) from error
    finally:
        on_node.ignore(*on_node.SIGNALS)  # otherwise a signal during Python's shutdown would replace the exit code


def note_failure(failed_at: list[int], entry: logging.LogRecord) -> bool:
    """Note the time when torchrun finds a failed rank. Return whether to print the log entry.

    torchrun logs the failed rank only after it has ended the other ranks, which can take half a minute.
    Entries about stopped ranks and about ranks that torchrun ends are dropped, because they are not the user's errors.
    """
    text = entry.getMessage()
    if re.search(r"failed \(exitcode|closing signal", text):
        failed_at.append(time.time_ns())
    return not re.search(f"exitcode: {STOPPED}|closing signal", text)


def join_nodes(
    create_store: Callable, host: str, port: int, nodes: int, first: bool, timeout: timedelta, **options: Any
) -> Store:
    """Create the store through which the nodes meet, and wait until all nodes have joined. Raises DistError.

    The store itself would wait in C++. Python runs no signal handler there, so Ctrl-C would have no effect.
    """
    store = create_store(host, port, nodes, first, timeout, wait_for_workers=False, **options)
    store.add("joined", 1)
    for _ in range(int(10 * timeout.total_seconds())):
        if store.add("joined", 0) >= nodes:
            return store
        time.sleep(0.1)
    raise DistError(f"not all {nodes} nodes joined within {timeout.seconds} s")


def final_barrier(
    node_rank: int, barrier: Callable, store: Store, world_size: int, key_prefix: str, **options: Any
) -> None:
    """Call torchrun's last barrier, then let the first node wait until the other nodes no longer need its store."""
    barrier(store=store, world_size=world_size, key_prefix=key_prefix, **options)
    if world_size > 1 and node_rank == 0:
        store.wait([f"{key_prefix} left"])
    elif world_size > 1 and store.add(f"{key_prefix} leaving", 1) == world_size - 1:
        store.set(f"{key_prefix} left", "")


def prepare_rendezvous(arguments: argparse.Namespace, timeout: int) -> None:
    """Set up the static rendezvous. All nodes except the first wait until they can reach the first node."""
    if arguments.rdzv_backend != "static":
        what = f"{arguments.rdzv_backend} may execute code that anybody on the network writes into its store"
        remedy = "leave the flag out, and for several nodes give --master-addr, --master-port and --node-rank"
        raise WorkshopError("--rdzv-backend", what, remedy)
    arguments.rdzv_conf = f"timeout={timeout}"
    if parse_min_max_nnodes(arguments.nnodes)[1] == 1 and arguments.master_port is None:
        arguments.standalone = False
        arguments.master_addr = LOOPBACK
        arguments.master_port = free_port(str(os.getpid()))
    if arguments.master_addr == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo uses the address of this node's name
    if arguments.node_rank != 0:
        reach("rendezvous", arguments.master_addr, arguments.master_port, timeout)
    else:
        note_joining()


def share_cores(ranks: str) -> None:
    """Divide the cores over the ranks. Otherwise torchrun gives each rank one core and prints a four-line warning."""
    if ranks.isdecimal() and int(ranks) > 1:
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // int(ranks))))


def start_ranks(started: list[Any], start_processes: Callable, **options: Any) -> Any:
    """Let torchrun start the ranks, and note in `started` that there are ranks."""
    started.append(start_processes(**options))
    return started[-1]


def pass_signal_to_ranks(started: list[Any], earlier: list[int], number: int, frame: object) -> None:
    """Pass a signal on to the ranks. If there are no ranks yet, end this process. After their end, do nothing.

    `earlier` collects the signals. A rank that waits in a collective does not react to Ctrl-C, because Python cannot
    run the handler there. So a few seconds after a second Ctrl-C, the remaining ranks are killed.
    """
    ranks = psutil.Process().children()
    if not ranks and not started:
        sys.exit(128 + number)
    for rank in ranks:
        send_signal(rank, number)
    if number == signal.SIGINT and number in earlier:
        for rank in ranks:
            timer = threading.Timer(SECONDS_BEFORE_KILL, send_signal, [rank, signal.SIGKILL])
            timer.daemon = True
            timer.start()
    earlier.append(number)


def send_signal(rank: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.send_signal(number)


if __name__ == "__main__":
    run_program(main)
