"""A rank that hangs: it is noticed, named, and ends the job with exit code 3, instead of being waited for.

A rank can be stopped (SIGSTOP, a frozen node), out of reach (a dead network), or never come back from a call. The
others then wait for it in a collective: gloo for half an hour, NCCL for ten minutes, and neither says for whom.

The main thread of each rank says what it begins: `progress("step 12")`. A second one, as the first may be in a call
that never returns, writes how far it is into a small file, in a folder that all nodes see. When the main thread has
begun nothing new for HANG_TIMEOUT seconds (or has not joined for JOIN_TIMEOUT), the second looks at the files of all
ranks, says which rank is behind, and ends the process.

Nothing is judged by clocks or by the times of files, in which nodes differ: a rank is stopped when its file no longer
changes. A world of one has nobody to wait for, and no watchdog.
"""

import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import distributed_c10d

from distributed.rendezvous import first_address, join_timeout, missing_nodes, node_name, reach_rank_0
from records.schema import STOPPING_SIGNALS
from shared.errors import ENVIRONMENT, SECONDS_FOR_RANK_0, WorkshopError, report, whole_number
from shared.json_files import write_json

MARGIN = 60  # seconds by which PyTorch's own time-outs, which name nobody, come after this one
MOST_NAMED = 4
SECONDS_BETWEEN_LOOKS = 5  # at most, while the ranks join: someone may be waiting in front of a terminal
WAY_OUT = "look at that process and its node, or raise --ddp_timeout (HANG_TIMEOUT) if it only takes long"


class Sign(NamedTuple):
    """What a rank tells of itself in its file.

    number: counts up as long as the second thread runs. progress: how often the main thread has begun something new,
    and how many collectives of the group of all ranks it has begun. place: what it does, and the line of Python that it
    executes.
    """

    number: int
    host: str
    progress: list[int]
    place: str


class Watchdog(threading.Thread):
    def __init__(self, hang_timeout: int):
        super().__init__(name="watchdog", daemon=True)
        self.rank = whole_number("RANK")
        # known to all ranks before they have met: in the folder of job.sh, else beside the run record
        host, port = first_address()
        self.folder = Path(os.environ.get("RUN_DIR", "results"), f".ranks_{host}_{port}")
        self.hang_timeout = hang_timeout
        self.limit = join_timeout()  # of seconds without progress
        self.phase = "joining"
        self.begun = 0
        self.number = 0
        self.now = 0.0  # seconds, counted in intervals: a job that was suspended as a whole is not hung
        self.last_progress = 0.0
        self.ended = threading.Event()
        # Python writes the number of each signal that it handles into this socket, also while the main thread is in a
        # call of PyTorch and runs no handler
        self.signals, self.signals_end = socket.socketpair()
        self.signals_end.setblocking(False)
        self.before_exit: Callable[[WorkshopError], object] = lambda error: None

    def run(self) -> None:
        earlier: dict[int, Sign] = {}
        while not self.wait(interval := self.interval()):
            self.now += interval
            self.write()
            if not self.begun and self.rank == 0 and self.number == 2:
                self.tell_who_is_missing()
            waited = self.now - self.last_progress
            if waited < self.limit * 3 / 4:
                earlier = {}
            elif not earlier:
                earlier = self.read_signs()
            if waited > self.limit:
                self.end(earlier)

    def interval(self) -> float:
        """Seconds between two looks."""
        interval = min(self.limit, self.hang_timeout) / 20
        return interval if self.begun else min(interval, SECONDS_BETWEEN_LOOKS)

    def wait(self, seconds: float) -> bool:
        """Wait for these seconds or until the run ends, and return whether it has ended.

        While the ranks join, the main thread is in PyTorch's call, in which Ctrl-C does nothing: end the process here.
        """
        if self.begun:
            return self.ended.wait(seconds)
        if select.select([self.signals], [], [], seconds)[0]:
            number = self.signals.recv(1)[0]
            if number in STOPPING_SIGNALS and not self.begun:
                self.remove_sign()
                os._exit(128 + number)
        return self.ended.is_set()

    def tell_who_is_missing(self) -> None:
        """Print which ranks rank 0 waits for: a person at a terminal must not wait in silence."""
        if missing := set(range(whole_number("WORLD_SIZE"))) - self.read_signs().keys():
            print(f"waiting for {named(missing, {})} to join (Ctrl-C ends this run){way_out_of_pty()}", flush=True)

    def remove_sign(self) -> None:
        (self.folder / f"{self.rank}.json").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks still have their files there
            self.folder.rmdir()

    def write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk ends no training
            if self.number == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
            self.number += 1
            write_json(self.folder / f"{self.rank}.json", self.own_sign()._asdict())

    def own_sign(self) -> Sign:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        # in one step a rank that does not come to the collective in which the others wait has begun fewer
        group = distributed_c10d.GroupMember.WORLD
        collectives = group._get_sequence_number_for_group() if group else 0  # type: ignore[attr-defined]
        return Sign(self.number, node_name(), [self.begun, collectives], f"{self.phase}, at {line}")

    def read_signs(self) -> dict[int, Sign]:
        signs = {self.rank: self.own_sign()}
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(OSError):
                signs[int(path.stem)] = Sign(**json.loads(path.read_text()))
        return signs

    def end(self, earlier: dict[int, Sign]) -> None:
        """End this process. The rank that moves the folder away, which only one can, says why."""
        later = self.read_signs()
        moved = self.folder.with_name(f"{self.folder.name}_{self.rank}")
        try:
            if self.number:  # or there never was a folder
                self.folder.rename(moved)
            error = hang_error(self.rank, earlier, later, self.limit)
            report(error, first=self.rank)
            self.before_exit(error)
        except OSError:
            time.sleep(SECONDS_FOR_RANK_0)
        finally:
            shutil.rmtree(moved, ignore_errors=True)
            os._exit(ENVIRONMENT)


def hang_error(rank: int, earlier: dict[int, Sign], later: dict[int, Sign], limit: int) -> WorkshopError:
    """Names the ranks for which the others wait.

    earlier, later: what `rank` has read of each rank some time before its `limit` of seconds was over, and at its end.
    """
    ranks = set(range(whole_number("WORLD_SIZE")))
    missing = ranks - later.keys()
    begun, _ = later[rank].progress
    if missing and not begun:
        nodes = ", ".join(missing_nodes())  # a node as a whole, where there is one, says more than its ranks
        what = nodes or f"{named(missing, later)} did not join"
        way_out = f"check that node, or exclude it{way_out_of_pty()}"
        return WorkshopError("rendezvous", f"{what} within {limit} s", way_out, ENVIRONMENT)
    silent = {each for each in ranks if earlier.get(each) == later.get(each)}
    # not while it joins, as those that have joined write less often; nor where its own file cannot be written
    if silent and rank not in silent and begun:
        what = f"no answer from {named(silent, later, 'last heard: ')}, stopped or out of reach"
    else:
        least = min(sign.progress for sign in later.values())
        what = f"no progress of {named({each for each in later if later[each].progress == least}, later)}"
    return WorkshopError("hang", f"{what}, noticed by {named({rank}, later)} after {limit} s", WAY_OUT, ENVIRONMENT)


def way_out_of_pty() -> str:
    """Return what to do in a shell of `srun --pty -n 4`, where python is one of four tasks. Empty under torchrun."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1" or "TORCHELASTIC_RUN_ID" in os.environ:
        return ""
    return f"; Slurm announces {tasks} tasks, so in a shell of srun --pty unset SLURM_STEP_NUM_TASKS"


def named(ranks: set[int], signs: dict[int, Sign], last: str = "") -> str:
    """``rank 3 on node2 (step 12, at x.py:30 read)``, or what is known of it; of many the first ones."""
    nodes = os.environ.get("ALL_NODES", "").split()  # of job.sh; they have equally many ranks
    names = []
    for rank in sorted(ranks)[:MOST_NAMED]:
        node = rank // whole_number("LOCAL_WORLD_SIZE", "1")
        if rank in signs:
            names.append(f"rank {rank} on {signs[rank].host} ({last}{signs[rank].place})")
        else:
            names.append(f"rank {rank} on {nodes[node]}" if node < len(nodes) else f"rank {rank}")
    return ", ".join(names) + (f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else "")


# What the scripts call

current: Watchdog | None = None


def start(hang_timeout: int) -> int:
    """Before the process group is opened: reach rank 0, then watch. Returns the seconds that the group needs.

    Raises WorkshopError: exit code 2 for a missing MASTER_ADDR or MASTER_PORT, 3 for an address that is not reached.
    """
    global current
    # PyTorch's own time-outs, of groups that nobody gives one as well: longer, as they name nobody. transformers gives
    # --ddp_timeout to the first group only, and on the CPU to none
    seconds = max(hang_timeout, join_timeout()) + MARGIN
    distributed_c10d.default_pg_timeout = timedelta(seconds=seconds)
    distributed_c10d.default_pg_nccl_timeout = timedelta(seconds=seconds)
    if whole_number("WORLD_SIZE", "1") > 1:
        reach_rank_0()
        current = Watchdog(hang_timeout)
        signal.set_wakeup_fd(current.signals_end.fileno())
        current.start()
        atexit.register(stop)
    return seconds


def progress(phase: str) -> None:
    """The main thread goes on, and begins this. All ranks call it equally often, or the one with fewer is blamed."""
    if current:
        if not current.begun:
            signal.set_wakeup_fd(-1)  # the ranks have met
        current.phase = phase
        current.begun += 1
        current.last_progress = current.now
        current.limit = current.hang_timeout


def before_exit(action: Callable[[WorkshopError], object]) -> None:
    """Set what the rank that reports a hang does after the report, with the error, in the watchdog's thread."""
    if current:
        current.before_exit = action


def stop() -> None:
    """Before the ranks leave each other, and as the process ends."""
    if current:
        current.ended.set()
        current.signals_end.send(b"\0")  # it may wait for a signal
        current.join(SECONDS_FOR_RANK_0)
        current.remove_sign()
