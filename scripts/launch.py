"""torchrun as jobs need it: stopped in peace, ended with the training's exit code, and with the name of a missing node.

    python scripts/launch.py --nproc-per-node=2 scripts/train.py --deepspeed ds_configs/zero2.json

All arguments are torchrun's, and torchrun does the work. What is different:
  - It gives its ranks 30 seconds behind a signal, where the save of a checkpoint may take minutes. Here they are told,
    and end by themselves; after a second Ctrl-C they are killed.
  - It ends with 1 whatever happened, behind a page of traceback. Here with the code of the rank that failed first.
  - On one node it takes the c10d rendezvous, which executes what anybody on the network writes into its store. Here it
    is always the static one, which reads text; and it says which node did not come within JOIN_TIMEOUT seconds.
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
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import DistError, Store
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.utils import store as store_util
from torch.distributed.run import parse_args, parse_min_max_nnodes, run

from distributed.rendezvous import free_port, join_timeout, missing_nodes, node_name, note_joining, reach
from shared.errors import ENVIRONMENT, STOPPED, WorkshopError, run_program

LOOPBACK = "127.0.0.1"
SECONDS_BEFORE_KILL = 5  # in which ranks may end by themselves after a second Ctrl-C


def main() -> None:
    if "--help" in sys.argv[1:2]:
        print(__doc__)
    arguments = parse_args(sys.argv[1:])
    meet(arguments, join_timeout())
    share_cores(arguments.nproc_per_node)
    pass_signals_on(arguments)
    of_ranks = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    failed_at: list[int] = []  # nanoseconds
    of_ranks.addFilter(partial(note_failure, failed_at))
    store_util.barrier = partial(leave_last, arguments.node_rank, store_util.barrier)
    try:
        # job.sh removes its folder behind a launcher that was killed
        run_dir = os.environ.get("RUN_DIR")
        with tempfile.TemporaryDirectory(prefix="launch_", dir=run_dir, ignore_cleanup_errors=True) as folder:
            arguments.log_dir = arguments.log_dir or folder  # else torchrun leaves one behind for each launch
            run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code <= 0:  # -9: killed by signal 9
            code = 128 - code
        tell_of(f"rank {rank} on {node_name()}", code, min(failed_at, default=time.time_ns()))
        sys.exit(code)
    except DistError as error:
        missing = ", ".join(missing_nodes())
        what = f"{missing} within {join_timeout()} s" if missing else f"the nodes did not meet ({error})"
        way_out = "check that node, its name resolution and its firewall, or exclude it"
        raise WorkshopError("rendezvous", what, way_out, ENVIRONMENT) from error


def note_failure(failed_at: list[int], entry: logging.LogRecord) -> bool:
    """Notes when torchrun says that a rank has failed, and filters what it says: of a stop, and that it ends others."""
    text = entry.getMessage()
    if "failed (exitcode" in text:
        failed_at.append(time.time_ns())
    return not re.search(f"exitcode: {STOPPED}|closing signal", text)


def tell_of(rank: str, code: int, time_ns: int) -> None:
    """Name the rank that ended first on this node: for job.sh in a note, as a rank of another node may have ended
    before; without job.sh on stderr."""
    if run_dir := os.environ.get("RUN_DIR"):
        # a full disk must not change the exit code
        with contextlib.suppress(OSError), Path(run_dir, "exit_codes").open("a") as noted:
            noted.write(f"{time_ns} {code} {rank}\n")
    elif code != STOPPED:
        print(f"{rank} ended first, with exit code {code}", file=sys.stderr)


def leave_last(node_rank: int, barrier: Callable, store: Store, world_size: int, key_prefix: str, **how: Any) -> None:
    """torchrun's last barrier, behind which the first node, which holds the store, waits until no other needs it."""
    barrier(store=store, world_size=world_size, key_prefix=key_prefix, **how)
    if world_size > 1 and node_rank == 0:
        store.wait([f"{key_prefix} left"])
    elif world_size > 1 and store.add(f"{key_prefix} leaving", 1) == world_size - 1:
        store.set(f"{key_prefix} left", "")


def meet(arguments: argparse.Namespace, timeout: int) -> None:
    """Prepare the static rendezvous, and on all nodes but the first wait until that one can be reached."""
    if arguments.rdzv_backend != "static":
        what = f"{arguments.rdzv_backend} may execute what anybody on the network writes into its store"
        way_out = "leave it out, and give several nodes --master-addr, --master-port and --node-rank"
        raise WorkshopError("--rdzv-backend", what, way_out)
    arguments.rdzv_conf = f"timeout={timeout}"
    if parse_min_max_nnodes(arguments.nnodes)[1] == 1 and arguments.master_port is None:
        arguments.standalone = False
        arguments.master_addr = LOOPBACK
        arguments.master_port = free_port(str(os.getpid()))
    if arguments.master_addr == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # it would listen at the address of this node's name
    if arguments.node_rank != 0:
        reach("rendezvous", arguments.master_addr, arguments.master_port, timeout)
    else:
        note_joining()


def share_cores(ranks: str) -> None:
    """Give each rank its part of the cores; torchrun would give it one, and say so in four lines."""
    if ranks.isdecimal() and int(ranks) > 1:
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // int(ranks))))


def pass_signals_on(arguments: argparse.Namespace) -> None:
    arguments.signals_to_handle = "SIGQUIT"  # torchrun's own reaction is left for this one
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # nohup lets it ignore HUP. To INT all are deaf that a script starts in the background, as job.sh does
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, partial(tell_ranks, []))


def tell_ranks(told: list[int], number: int, frame: object) -> None:
    """Pass a signal on, and go on waiting for the ranks. Before there are any, it ends this process.

    told: the signals of this kind before. Python cannot hear Ctrl-C while it waits in a collective: a second one means
    that ranks which are still there after some seconds are killed.
    """
    ranks = psutil.Process().children()
    if not ranks:
        sys.exit(128 + number)
    for each in ranks:
        send(each, number)
    if number == signal.SIGINT and told:
        for each in ranks:
            end = threading.Timer(SECONDS_BEFORE_KILL, send, [each, signal.SIGKILL])
            end.daemon = True
            end.start()
    told.append(number)


def send(rank: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.send_signal(number)


if __name__ == "__main__":
    run_program(main)
