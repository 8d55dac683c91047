"""A rank that hangs: it is noticed, named, and ends the job with exit code 3, instead of being waited for.

A rank can be stopped (SIGSTOP, a frozen node), out of reach (a dead network), or never come back from a call. The
others then wait for it in a collective: gloo for half an hour, NCCL for ten minutes, and neither says for whom.

The main thread of each rank says that it goes on: `beat("step 12")`. When it has not for HANG_TIMEOUT seconds (or not
joined for JOIN_TIMEOUT), the rank compares itself with the others, and the first of those that still answer reports.
Two threads beside the main one do this, since it may be in a call that never returns:

- the messenger leaves a sign of life in the job's store, and once it is suspicious reads those of the others. It may
  block for ever, when who serves the store is the one that hangs.
- the judge talks to nobody. It decides by what the messenger has heard, prints the line, and ends the process.

A world of one has nobody to wait for, and no watchdog.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from errors import ENVIRONMENT, SECONDS_FOR_RANK_0, WorkshopError, report, whole_number
from parallel.joining import (
    first_address,
    join_timeout,
    node_name,
    reach,
    reach_rank_0,
    torchrun_serves_the_store,
)

JOINING = "joining"
# seconds by which PyTorch's own time-outs, which name nobody, come after this one
MARGIN = 60
MOST_NAMED = 4
WAY_OUT = "look at that process and its node, or raise --ddp_timeout (HANG_TIMEOUT) if it only takes long"


@dataclass(frozen=True)
class Sign:
    """What a rank tells of itself.

    number: counts up as long as its messenger runs. beats: how often its main thread has gone on, and `phase` where to.
    collectives: how many it has begun, and `waits_in` the first that is not done, "" if all are.
    at: the line that its main thread executes.
    """

    number: int
    host: str
    beats: int
    phase: str
    collectives: int = 0
    waits_in: str = ""
    at: str = ""

    @property
    def place(self) -> str:
        where = f"in {self.waits_in}" if self.waits_in else f"at {self.at}" if self.at else ""
        return f"{self.phase}, {where}" if where else self.phase

    @property
    def progress(self) -> tuple[int, int]:
        return self.beats, self.collectives


class Watchdog:
    def __init__(self, rank: int, world_size: int, hang_timeout: float, join_timeout: float):
        self.rank = rank
        self.world_size = world_size
        self.limits = {JOINING: join_timeout}
        self.hang_timeout = hang_timeout
        self.interval = max(0.1, min(3.0, hang_timeout / 20, join_timeout / 20))
        self.phase = JOINING
        self.beats = 0
        self.before_exit: Callable[[], object] = lambda: None
        # seconds by a clock that stands still while this process does: a job that was suspended as a whole is not hung
        self.now = 0.0
        self.last_beat = 0.0
        self.store_answered = 0.0
        self.heard: dict[int, tuple[Sign, float]] = {}  # per rank: its latest sign, and when that was new
        self.ended = threading.Event()
        self.main_thread = threading.main_thread().ident

    def start(self) -> None:
        for work in (self.carry_messages, self.judge):
            threading.Thread(target=work, name="watchdog", daemon=True).start()

    @property
    def limit(self) -> float:
        """Seconds without a beat that are a hang."""
        return self.limits.get(self.phase, self.hang_timeout)

    @property
    def suspicious(self) -> bool:
        return self.now - self.last_beat > self.limit / 4

    # The judge

    def judge(self) -> None:
        beats = self.beats
        before = time.monotonic()
        while not self.ended.wait(self.interval):
            now = time.monotonic()
            self.now += min(now - before, 2 * self.interval)
            before = now
            if self.beats != beats:
                beats = self.beats
                self.last_beat = self.now
            if self.now - self.last_beat > self.limit:
                self.end()

    def end(self) -> None:
        """Report, and end this process. Other ranks than the first that answers report only if that one does not."""
        phase, limit = self.phase, self.limit
        signs = {rank: sign for rank, (sign, _) in self.heard.items()}
        silent = {rank for rank, (_, when) in self.heard.items() if self.is_silent(when)} - {self.rank}
        first = min(signs.keys() - silent, default=self.rank)
        if self.is_silent(self.store_answered):
            error = store_error(self.own_sign(0, with_details=True), phase, limit)
            first = 0 if torchrun_serves_the_store() else 1
        else:
            error = hang_error(signs, silent, self.world_size, phase, limit)
        try:
            if self.rank == first or not self.is_reported_by(first):
                report(error, first=self.rank)
                self.before_exit()
        finally:
            os._exit(error.code)

    def is_reported_by(self, first: int) -> bool:
        """Wait for the rank that reports: whether it has ended meanwhile. Its launcher may end this one at once."""
        # a checkpoint, which train.py would make now, needs the rank that hangs
        ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, signal.SIG_DFL)
        before = self.heard.get(first)
        time.sleep(SECONDS_FOR_RANK_0)  # in which a sign comes
        return before is not None and self.heard[first] == before

    def is_silent(self, since: float) -> bool:
        return self.now - since > self.limit / 4

    # The messenger

    def carry_messages(self) -> None:
        host, port = first_address()
        try:
            # rank 0 may have to open the store first; it does not print a warning for each attempt, as PyTorch would
            reach("MASTER_ADDR", host, port, join_timeout())
            # it has no time-out to speak of: if the store does not answer, the judge says so
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(days=1), wait_for_workers=False)
            number = 0
            while not self.ended.is_set():
                number += 1
                self.exchange(store, number)
                self.ended.wait(self.interval)
        except (dist.DistError, WorkshopError):
            return  # who serves the store has ended, and its launcher ends this process; if not, the judge does

    def exchange(self, store: dist.Store, number: int) -> None:
        """Leave a sign; read the others' when this rank is suspicious."""
        suspicious = self.suspicious
        sign = self.own_sign(number, with_details=suspicious)
        store.set(key(self.rank), json.dumps(asdict(sign)))
        if not suspicious:
            return
        for rank in range(self.world_size):
            if store.check([key(rank)]):
                self.hear(rank, Sign(**json.loads(store.get(key(rank)))))
        self.store_answered = self.now

    def hear(self, rank: int, sign: Sign) -> None:
        if rank not in self.heard or self.heard[rank][0].number != sign.number:
            self.heard[rank] = (sign, self.now)

    def own_sign(self, number: int, with_details: bool) -> Sign:
        sign = Sign(number, node_name(), self.beats, self.phase)
        if not with_details:
            return sign
        begun, waits_in = collectives()
        return Sign(number, sign.host, sign.beats, sign.phase, begun, waits_in, self.current_line())

    def current_line(self) -> str:
        """What the main thread executes: ``callbacks.py:30 on_step_end``."""
        frame = sys._current_frames().get(self.main_thread or 0)
        if frame is None:
            return ""
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def key(rank: int) -> str:
    return f"watchdog/{rank}"


def collectives() -> tuple[int, str]:
    """How many this rank has begun, and the name of the first that is not done, by PyTorch's flight recorder."""
    begun = 0
    waits_in = ""
    for recorder in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # of gloo, and of NCCL where it is compiled in
        dump = getattr(_distributed_c10d, recorder, lambda: "{}")
        entries = json.loads(dump()).get("entries", [])
        if entries:
            begun += entries[-1]["record_id"] + 1
            waits_in = next((entry["profiling_name"] for entry in entries if not entry["retired"]), waits_in)
    return begun, waits_in


# What is said


def hang_error(signs: dict[int, Sign], silent: set[int], world_size: int, phase: str, limit: float) -> WorkshopError:
    """Names the ranks for which the others wait.

    signs: the latest of each rank that ever left one. silent: the ranks whose latest is old. phase, limit: of the rank
    that judges.
    """
    missing = set(range(world_size)) - signs.keys()
    if phase == JOINING and missing:
        what = f"{named(missing, signs)} did not join within {limit:g} s"
        return WorkshopError("rendezvous", what, "check that node, or exclude it", ENVIRONMENT)
    culprits = silent | missing
    if culprits:
        what = f"no answer from {named(culprits, signs)}, stopped or out of reach"
    else:
        least = min(sign.progress for sign in signs.values())
        culprits = {rank for rank, sign in signs.items() if sign.progress == least}
        what = f"no progress of {named(culprits, signs)} beyond {signs[min(culprits)].place}"
    others = sorted(signs.keys() - culprits)
    if others:
        what += f" ({named({others[0]}, signs)} has waited for {limit:g} s, {signs[others[0]].place})"
    else:
        places = [f"{named({rank}, signs)} {signs[rank].place}" for rank in sorted(signs)[:MOST_NAMED]]
        what = f"no progress of any rank for {limit:g} s ({', '.join(places)})"
    return WorkshopError("hang", what, WAY_OUT, ENVIRONMENT)


def store_error(own: Sign, phase: str, limit: float) -> WorkshopError:
    """For a rank, whose sign is `own`, to which the store does not answer, and so nobody."""
    host, port = first_address()
    server = f"{'the torchrun' if torchrun_serves_the_store() else 'rank 0'} at {host}:{port}"
    if phase == JOINING:
        what = f"{server} did not answer {own.host} within {limit:g} s"
        return WorkshopError("rendezvous", what, "check that node, or exclude it", ENVIRONMENT)
    what = f"no answer from {server}, stopped or out of reach ({own.host} has waited for {limit:g} s, {own.place})"
    return WorkshopError("hang", what, WAY_OUT, ENVIRONMENT)


def named(ranks: set[int], signs: dict[int, Sign]) -> str:
    """``rank 3 on node2``, with what is known of each; of many the first ones."""
    names = [f"rank {rank}{on_node(rank, signs)}" for rank in sorted(ranks)]
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def on_node(rank: int, signs: dict[int, Sign]) -> str:
    if rank in signs:
        return f" on {signs[rank].host}"
    # it has never told: job.sh knows the nodes, which have equally many ranks
    nodes = os.environ.get("ALL_NODES", "").split()
    number = rank // whole_number("LOCAL_WORLD_SIZE", "1")
    return f" on {nodes[number]}" if number < len(nodes) else ""


# What the scripts call

current: Watchdog | None = None


def start(hang_timeout: int) -> int:
    """Before the process group is opened: reach rank 0, then watch. Returns the seconds that the group needs.

    Raises WorkshopError: exit code 2 for a MASTER_ADDR or MASTER_PORT that cannot be, 3 for one that is not reached.
    """
    global current
    # PyTorch's own time-outs, of groups that nobody gives one as well: longer, as they name nobody. transformers gives
    # --ddp_timeout to the first group only, and on the CPU to none
    seconds = max(hang_timeout, join_timeout()) + MARGIN
    distributed_c10d.default_pg_timeout = timedelta(seconds=seconds)
    distributed_c10d.default_pg_nccl_timeout = timedelta(seconds=seconds)
    world_size = whole_number("WORLD_SIZE", "1")
    if world_size > 1:
        reach_rank_0()
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the flight recorder, which gloo else leaves off
        current = Watchdog(whole_number("RANK"), world_size, hang_timeout, join_timeout())
        current.start()
    return seconds


def beat(phase: str) -> None:
    """The main thread goes on, and begins this. All ranks call it equally often, or the one with fewer is blamed."""
    if current:
        current.phase = phase
        current.beats += 1


def before_exit(action: Callable[[], object]) -> None:
    """What the rank that reports a hang still does, in another thread than the main one."""
    if current:
        current.before_exit = action


def stop() -> None:
    """Before the ranks leave each other, and the store with them."""
    if current:
        current.ended.set()
