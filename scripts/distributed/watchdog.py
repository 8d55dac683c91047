"""A watchdog that ends a hanging job with exit code 3 and names the rank that hangs.

A rank can be stopped (SIGSTOP, a frozen node), unreachable (a dead network) or in a call that never returns. The other
ranks then wait for it in a collective: half an hour with gloo, ten minutes with NCCL. Neither library names the rank.

The main thread of each rank records each phase that it starts: `progress("step 12")`. The watchdog is a second thread,
because the main thread may be in a call that never returns. It writes the rank's progress into a small heartbeat file,
in a folder that all nodes share. When the main thread has started no phase for HANG_TIMEOUT seconds, or has not joined
for JOIN_TIMEOUT seconds, the watchdog reads the heartbeat files of all ranks. It reports the rank that hangs and ends
the process. Before that, each rank that still runs writes the list of its last collectives (PyTorch's flight record).

Clocks and file times differ between nodes, so the watchdog does not use them. A rank counts as stopped when its
heartbeat file no longer changes. A run with one rank has no watchdog.
"""

import atexit
import contextlib
import errno
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

from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from distributed.rendezvous import first_address, join_timeout, missing_nodes, node_name, reach_rank_0
from shared.errors import ENVIRONMENT, SECONDS_FOR_RANK_0, STOPPING_SIGNALS, WorkshopError, report, whole_number
from shared.json_files import write_json

MARGIN = 60  # seconds by which PyTorch's own timeouts are longer, because PyTorch does not name the rank
MOST_NAMED = 4
FOLDER_IS_GONE = (errno.ENOENT, errno.ESTALE)  # on a local file system, on NFS
# Upper limit while the ranks join, because a user may be waiting at a terminal. It also applies near the end of a hang,
# so that a rank notices in time that another rank reports
SECONDS_BETWEEN_LOOKS = 5
WAY_OUT = "look at that process and its node, or raise --ddp_timeout (HANG_TIMEOUT) if it only takes long"


class Heartbeat(NamedTuple):
    """Content of a rank's heartbeat file.

    number: increases as long as the watchdog thread runs. progress: number of phases that the main thread has started,
    and number of collectives that it has started in the group of all ranks. place: the current phase, and the line of
    Python that the main thread executes.
    """

    number: int
    host: str
    progress: list[int]
    place: str


class Watchdog(threading.Thread):
    def __init__(self, hang_timeout: int):
        super().__init__(name="watchdog", daemon=True)
        self.rank = whole_number("RANK")
        # Each rank knows where this folder is before it joins: in the folder of the job's attempt, or in results
        host, port = first_address()
        self.folder = Path(os.environ.get("RUN_DIR", "results"), f".ranks_{host}_{port}")
        # This folder stays after the job. The folder of the attempt does not
        job = os.environ.get("JOB_ID") or os.environ.get("SLURM_JOB_ID") or f"{host}_{port}"
        self.flight_records = Path("results", f"{job}_flight_record")
        self.hang_timeout = hang_timeout
        self.limit = join_timeout()  # seconds without progress
        self.phase = "joining"
        self.phases_started = 0
        self.number = 0
        # Count the seconds as a sum of intervals, so that a job that was suspended as a whole does not look hung
        self.now = 0.0
        self.last_progress = 0.0
        self.ended = threading.Event()
        # Python writes the number of each handled signal into this socket, even while the main thread is in a call of
        # PyTorch and cannot run the handler
        self.signals, self.signals_end = socket.socketpair()
        self.signals_end.setblocking(False)
        self.before_exit: Callable[[WorkshopError], object] = lambda error: None

    def run(self) -> None:
        earlier: dict[int, Heartbeat] = {}
        while not self.wait(interval := self.interval()):
            self.now += interval
            self.write()
            if not self.phases_started and self.rank == 0 and self.number == 2:
                self.print_missing_ranks()
            if not self.has_waited_long():
                earlier = {}
            elif not earlier:
                earlier = self.read_heartbeats()
            if self.now - self.last_progress > self.limit:
                self.end(earlier)

    def has_waited_long(self) -> bool:
        return self.now - self.last_progress >= self.limit * 3 / 4

    def interval(self) -> float:
        """Return the seconds between two heartbeats."""
        interval = min(self.limit, self.hang_timeout) / 20
        often = not self.phases_started or self.has_waited_long()
        return min(interval, SECONDS_BETWEEN_LOOKS) if often else interval

    def wait(self, seconds: float) -> bool:
        """Wait for these seconds or until the run ends. Return True if the run has ended.

        While the ranks join, the main thread is in a PyTorch call that ignores Ctrl-C. So this method ends the process.
        """
        if self.phases_started:
            return self.ended.wait(seconds)
        if select.select([self.signals], [], [], seconds)[0]:
            number = self.signals.recv(1)[0]
            if number in STOPPING_SIGNALS and not self.phases_started:
                self.remove_heartbeat()
                os._exit(128 + number)
        return self.ended.is_set()

    def print_missing_ranks(self) -> None:
        """Print which ranks rank 0 waits for, so that a user at a terminal knows why nothing happens."""
        if missing := set(range(whole_number("WORLD_SIZE"))) - self.read_heartbeats().keys():
            print(
                f"waiting for {describe_ranks(missing, {})} to join (Ctrl-C ends this run){advice_for_pty()}",
                flush=True,
            )

    def remove_heartbeat(self) -> None:
        (self.folder / f"{self.rank}.json").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks still have files in it
            self.folder.rmdir()

    def write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk does not stop the training
            if self.number == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
            self.number += 1
            try:
                write_json(self.folder / f"{self.rank}.json", self.own_heartbeat()._asdict())
            except OSError as error:
                if error.errno in FOLDER_IS_GONE:  # another rank has moved it: that rank reports a hang
                    self.write_flight_record()
            if self.number == 1:
                self.flight_record().unlink(missing_ok=True)  # from an earlier attempt of this job

    def own_heartbeat(self) -> Heartbeat:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        # A rank that has not reached the collective in which the other ranks wait has a lower count
        group = distributed_c10d.GroupMember.WORLD
        collectives = group._get_sequence_number_for_group() if group else 0  # type: ignore[attr-defined]
        return Heartbeat(self.number, node_name(), [self.phases_started, collectives], f"{self.phase}, at {line}")

    def read_heartbeats(self) -> dict[int, Heartbeat]:
        heartbeats = {self.rank: self.own_heartbeat()}
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(OSError):
                heartbeats[int(path.stem)] = Heartbeat(**json.loads(path.read_text()))
        return heartbeats

    def flight_record(self, rank: int | None = None) -> Path:
        """Return the path of a rank's flight record, by default of this rank's."""
        return self.flight_records / f"rank_{self.rank if rank is None else rank}.json"

    def write_flight_record(self) -> None:
        """Write the list of this rank's last collectives, if it has opened a process group."""
        if not distributed_c10d.is_initialized():
            return
        # PyTorch asks the GPU's driver which collectives have ended. A call that does not return would block all
        # threads of Python. SIGALRM then ends the process (exit code 142), because Python does not handle this signal
        signal.alarm(SECONDS_FOR_RANK_0)
        try:
            record = last_collectives()
        except (RuntimeError, ValueError):  # for example after an error of the GPU
            return
        finally:
            signal.alarm(0)
        with contextlib.suppress(OSError):  # a full disk must not prevent the end
            self.flight_records.mkdir(parents=True, exist_ok=True)
            write_json(self.flight_record(), record)

    def wait_for_flight_records(self, ranks: set[int]) -> None:
        """Wait for the files of other ranks, because a launcher ends all ranks when the first one has ended."""
        deadline = time.monotonic() + SECONDS_FOR_RANK_0
        while time.monotonic() < deadline and not all(self.flight_record(rank).exists() for rank in ranks):
            time.sleep(0.1)

    def end(self, earlier: dict[int, Heartbeat]) -> None:
        """End this process. Only one rank succeeds in moving the folder away, and this rank reports the error."""
        later = self.read_heartbeats()
        moved = self.folder.with_name(f"{self.folder.name}_{self.rank}")
        try:
            if self.number:  # otherwise the folder was never created
                self.folder.rename(moved)
            flight_records = self.flight_records if distributed_c10d.is_initialized() else None
            error = hang_error(self.rank, earlier, later, self.limit, flight_records)
            report(error, first=self.rank)
            self.before_exit(error)
            if flight_records:
                self.wait_for_flight_records(later.keys() - silent_ranks(earlier, later) - {self.rank})
            self.write_flight_record()
        except OSError:  # another rank reports
            self.write_flight_record()
            time.sleep(2 * SECONDS_FOR_RANK_0)  # a launcher names the rank that ends first, so the other rank must
        finally:
            shutil.rmtree(moved, ignore_errors=True)
            os._exit(ENVIRONMENT)


def last_collectives() -> dict:
    """Return PyTorch's flight record of this process: by default, its last 2000 collectives of each backend.

    PyTorch has one recorder for NCCL, which exists only in builds with CUDA, and one for gloo.
    """
    record: dict = {}
    entries: list[dict] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if hasattr(_distributed_c10d, name):
            record |= json.loads(getattr(_distributed_c10d, name)())
            entries += record.pop("entries", [])
    return record | {"entries": entries}


def silent_ranks(earlier: dict[int, Heartbeat], later: dict[int, Heartbeat]) -> set[int]:
    """Return the ranks without a heartbeat, and the ranks whose heartbeat has not changed."""
    return {each for each in range(whole_number("WORLD_SIZE")) if earlier.get(each) == later.get(each)}


def hang_error(
    rank: int,
    earlier: dict[int, Heartbeat],
    later: dict[int, Heartbeat],
    limit: int,
    flight_records: Path | None = None,
) -> WorkshopError:
    """Return an error that names the ranks for which the other ranks wait.

    rank: the rank that has waited `limit` seconds. earlier, later: the heartbeats that this rank read some
    time before the limit, and at the limit. flight_records: the folder where the ranks write their last collectives.
    """
    missing = set(range(whole_number("WORLD_SIZE"))) - later.keys()
    phases_started, _ = later[rank].progress
    if missing and not phases_started:
        nodes = ", ".join(missing_nodes())  # name a missing node rather than its ranks
        what = nodes or f"{describe_ranks(missing, later)} did not join"
        remedy = f"check that node, or exclude it{advice_for_pty()}"
        return WorkshopError("rendezvous", f"{what} within {limit} s", remedy, ENVIRONMENT)
    silent = silent_ranks(earlier, later)
    # Skip this while `rank` joins, because ranks that have joined write less often. Skip it also if `rank` is itself
    # silent, because its own file cannot be written
    if silent and rank not in silent and phases_started:
        what = f"no answer from {describe_ranks(silent, later, 'last heard: ')}, stopped or out of reach"
    else:
        least = min(each.progress for each in later.values())
        slowest = {each for each in later if later[each].progress == least}
        what = f"no progress of {describe_ranks(slowest, later)}"
    what += f", noticed by {describe_ranks({rank}, later)} after {limit} s"
    remedy = WAY_OUT + (f"; the last collectives of the ranks are in {flight_records}" if flight_records else "")
    return WorkshopError("hang", what, remedy, ENVIRONMENT)


def advice_for_pty() -> str:
    """Return advice for a shell of `srun --pty -n 4`, in which python is one of four tasks. Empty under torchrun."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1" or "TORCHELASTIC_RUN_ID" in os.environ:
        return ""
    return f"; Slurm announces {tasks} tasks, so in a shell of srun --pty unset SLURM_STEP_NUM_TASKS"


def describe_ranks(ranks: set[int], heartbeats: dict[int, Heartbeat], last: str = "") -> str:
    """Return the first ranks as text, such as ``rank 3 on node2 (step 12, at x.py:30 read)``.

    A rank without a heartbeat has only its number, and its node if the node is known.
    """
    nodes = os.environ.get("ALL_NODES", "").split()  # run_job.py sets it; each node has the same number of ranks
    names = []
    for rank in sorted(ranks)[:MOST_NAMED]:
        node = rank // whole_number("LOCAL_WORLD_SIZE", "1")
        if rank in heartbeats:
            names.append(f"rank {rank} on {heartbeats[rank].host} ({last}{heartbeats[rank].place})")
        else:
            names.append(f"rank {rank} on {nodes[node]}" if node < len(nodes) else f"rank {rank}")
    return ", ".join(names) + (f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else "")


# The functions below are the interface for the scripts

current: Watchdog | None = None


def start(hang_timeout: int) -> int:
    """Wait until rank 0 is reachable, then start the watchdog. Call this before the process group is opened.

    Returns the timeout in seconds for the process group. It must be longer than the watchdog's.

    Raises WorkshopError: exit code 2 for a missing MASTER_ADDR or MASTER_PORT, 3 for an unreachable address.
    """
    global current
    # Set PyTorch's default timeouts too: transformers passes --ddp_timeout only to the first group, and on the CPU to
    # none. The defaults must be longer than the watchdog's timeout, because PyTorch does not name the rank
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
    """Record that the main thread starts `phase`.

    All ranks must call this equally often: the rank with the fewest calls is reported.
    """
    if current:
        if not current.phases_started:
            signal.set_wakeup_fd(-1)  # the ranks have joined
        current.phase = phase
        current.phases_started += 1
        current.last_progress = current.now
        current.limit = current.hang_timeout


def before_exit(action: Callable[[WorkshopError], object]) -> None:
    """Set the action that the reporting rank runs after its report.

    The action gets the error as its argument, and runs in the watchdog's thread.
    """
    if current:
        current.before_exit = action


def stop() -> None:
    """Stop the watchdog. Call this before the process group is closed; it also runs when the process ends."""
    if current:
        current.ended.set()
        current.signals_end.send(b"\0")  # wake up the watchdog thread, which may wait for a signal
        current.join(SECONDS_FOR_RANK_0)
        current.remove_heartbeat()
