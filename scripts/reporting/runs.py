"""The runs below some folders: their records, what their memory logs say, and what is missing or damaged."""

import math
import os
import subprocess
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from reporting.memory_logs import MemoryLog, host_of, logs_of, read_cpu_log, read_gpu_log
from reporting.record import Record, Restart, read_run_record
from reporting.trainer_log import error_in, log_of

SCHEMA = 1
FOLDERS = {"results", "gpu_memory", "cpu_memory", "log", "output"}
MANY = 50  # runs from which on a second core pays
ENDED_ABNORMALLY = ("failed", "oom", "timeout", "stopped")
INCOMPLETE = "incomplete"  # the status of a run without a record that can be read
BEFORE_IT_BEGAN = "the job ended before its training began"
NO_RECORD = Record.model_validate({"status": "failed", "settings": {}})
LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass
class Memory:
    """One kind of memory over a whole job, in MiB: over all its GPUs, or over all its nodes.

    peak, minimum: of any GPU (node) at any time; mean: over time and GPUs (nodes). None with a `reason`.
    """

    peak: float | None = None
    minimum: float | None = None
    mean: float | None = None
    reason: str = ""


@dataclass
class Run:
    folder: Path
    job_id: str
    record: Record = NO_RECORD
    status: str = INCOMPLETE
    status_note: str = ""
    problems: list[str] = field(default_factory=list)  # what makes its numbers incomplete
    notes: list[str] = field(default_factory=list)  # what a reader of its numbers must know besides
    gpu: Memory = field(default_factory=Memory)
    cpu: Memory = field(default_factory=Memory)
    path: Path | None = None  # of its record

    @property
    def experiment(self) -> str:
        """Folder of the experiment below experiments/."""
        return (self.record.experiment or "").removeprefix("experiments/") or experiment_of(self.folder)

    @property
    def has_record(self) -> bool:
        return self.status != INCOMPLETE

    @property
    def completed(self) -> bool:
        return self.status == "completed"

    @property
    def profiled(self) -> bool:
        """Whether --profile slowed it down; a run of too few steps has no profile for it."""
        return bool(self.record.settings.profile or self.record.profile)

    @property
    def model(self) -> str:
        return self.record.settings.model_name or ""

    @property
    def order(self) -> tuple:
        """Sorts runs by their start; job ids of numbers by their value."""
        return self.record.started or LONG_AGO, len(self.job_id), self.job_id

    def get(self, path: str) -> Any:
        """Value at a path such as ``train.runtime_s`` or ``eval.-1.loss``, None where there is none."""
        value: Any = self.record
        for key in path.split("."):
            if isinstance(value, list):
                value = value[int(key)] if -len(value) <= int(key) < len(value) else None
            else:
                value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
        return value

    def why_missing(self, path: str) -> str:
        """Why there is no value at this path."""
        for name in (path, path.split(".")[0]):
            if self.record.missing.get(name):
                return self.record.missing[name]
        if not self.completed:
            return f"the run's status is {self.status}"
        if path.startswith("callbacks.avg_") and self.record.hardware.gpus == 0:
            return "no GPU"
        return "not measured"

    def gpu_hours(self) -> tuple[float | None, str]:
        """GPUs of the job x hours from the start of each of its parts to the part's end, or why they are not known."""
        if not self.has_record:
            return None, "no run record that can be read"
        seconds = 0.0
        parts: list[Record | Restart] = [self.record, *self.record.restarts]
        for part in parts:
            if not part.started or not part.finished or part.finished < part.started:
                return None, "its end was not recorded" if part is self.record else "the end of a part was not recorded"
            seconds += (part.finished - part.started).total_seconds()
        if not self.record.hardware.gpus:
            return None, "no GPU"
        return self.record.hardware.gpus * seconds / 3600, ""


def experiment_of(folder: Path) -> str:
    """The folder as seen from the last `experiments` above it, else its own name."""
    parts = folder.absolute().parts
    last = max((i for i, part in enumerate(parts) if part == "experiments"), default=len(parts) - 2)
    return "/".join(parts[last + 1 :])


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """All runs below the folders, oldest first."""
    records: list[Path] = []
    logs: list[Path] = []
    outputs: list[Path] = []
    for top in folders:
        for folder, subfolders, _ in os.walk(top):
            here = Path(folder)
            records += here.glob("results/*.json")
            logs += [*here.glob("gpu_memory/gpu_memory_log_*.csv"), *here.glob("cpu_memory/cpu_memory_log_*.txt")]
            outputs += here.glob("log/*_*.out")
            if here.name == "results" and here == Path(top):
                records += here.glob("*.json")
            subfolders[:] = sorted(s for s in subfolders if s not in FOLDERS and not s.startswith("."))
    runs = read_all(sorted(set(records)))
    known = {(run.folder, run.job_id) for run in runs}
    begun = {job_of(path, known) for path in logs} - known
    runs += [run_without_record(*job) for job in sorted(begun)]
    runs += refused_jobs(set(outputs), known | begun)
    return sorted(runs, key=lambda run: run.order)


def read_all(paths: list[Path]) -> list[Run]:
    if len(paths) < MANY:
        return [read_run(path) for path in paths]
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(read_run, paths, chunksize=8))


def job_of(log: Path, known: set[tuple[Path, str]]) -> tuple[Path, str]:
    """(folder, job id) of the job that left a memory log, ``<id>`` or ``<id>_<host>``; an id may hold a _ itself."""
    folder = log.parent.parent
    words = log.stem.split("_")[3:]
    ids = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
    return next(((folder, job_id) for job_id in ids if (folder, job_id) in known), (folder, ids[0]))


def read_run(path: Path) -> Run:
    """The run of a record. A record that cannot be read makes an incomplete run, not an error."""
    run = Run(path.parent.parent, path.stem, path=path)
    try:
        run.record = read_run_record(path)
    except OSError as error:
        run.problems.append(f"{path}: {error.strerror}")
    except ValueError as error:
        run.problems.append(f"{path}: {error}")
    else:
        run.job_id = run.record.job_id or run.job_id
        settle(run, path)
    add_memory(run)
    return run


def settle(run: Run, path: Path) -> None:
    """Status of a run from its record; one that says `running` and is not has failed."""
    record = run.record
    run.status = record.status
    if record.version != SCHEMA:
        run.problems.append(f"{path}: schema {record.version}, this report knows {SCHEMA}")
    notes = []
    if run.status == "running" and not alive(run):
        run.status = "failed"
        notes.append("the record still says running, but its job is gone")
    elif run.status in ENDED_ABNORMALLY and record.exit_code is not None:
        notes.append(f"exit code {record.exit_code}")
        log = log_of(run.folder, run.job_id)
        # a run that was stopped may have begun several times: the line would be another attempt's
        notes += filter(None, [error_in(log) if log and run.status in ("failed", "oom") else ""])
    anew = sum(restart.step == 0 for restart in record.restarts)
    if resumed := len(record.restarts) - anew:
        notes.append(f"resumed {resumed} time{'s' if resumed > 1 else ''}")
    if anew:
        notes.append(f"begun anew {anew} time{'s' if anew > 1 else ''}")
    if not record.restarts and record.attempt and record.attempt > 1:
        notes.append(f"attempt {record.attempt}")
    if record.settings.torch_compile:
        notes.append("memory peaks hold the compilation")
    if record.overrides:
        notes.append(f"does not compare: {', '.join(record.overrides)}")
    run.status_note = "; ".join(notes)


def run_without_record(folder: Path, job_id: str) -> Run:
    run = Run(folder, job_id)
    path = log_of(folder, job_id)
    refused = error_in(path) if path else ""
    what = "no run record, the training has not begun, or the job ended before"
    run.problems.append(f"{path}: {refused}" if refused else f"{folder}/results/{job_id}.json: {what}")
    add_memory(run)
    return run


def refused_jobs(outputs: Iterable[Path], known: set[tuple[Path, str]]) -> list[Run]:
    """A run for each job log that holds an error line and belongs to none of the known runs."""
    names = {(folder, f"_{job_id}.out") for folder, job_id in known}
    runs = []
    for path in sorted(outputs):
        folder = path.parent.parent
        # a job id may hold a _ itself
        ends = {path.name[at:] for at, character in enumerate(path.name) if character == "_"}
        if any((folder, end) in names for end in ends) or not (refused := error_in(path)):
            continue
        run = Run(folder, path.stem.rpartition("_")[2])
        run.problems.append(f"{path}: {refused}")
        run.gpu.reason = run.cpu.reason = BEFORE_IT_BEGAN
        runs.append(run)
    return runs


def alive(run: Run) -> bool:
    """Whether the job of a record that says `running` exists: in Slurm's queue, or as a process of this machine."""
    if run.job_id in queued_jobs():
        return True
    if run.record.pid is None or run.record.nodes[:1] != [os.uname().nodename]:
        return False
    try:
        return b"train.py" in Path(f"/proc/{run.record.pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


@cache
def queued_jobs() -> frozenset[str]:
    try:
        done = subprocess.run(["squeue", "--noheader", "--format=%A"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(done.stdout.split())


def add_memory(run: Run) -> None:
    """Fill in what the memory logs of all nodes say."""
    gpu_logs, cpu_logs = logs_of(run.folder, run.job_id)
    nodes = len(run.record.nodes) or 1
    ranks = (run.record.world_size or 0) // nodes
    restarts = max(len(run.record.restarts), (run.record.attempt or 1) - 1)  # one may have ended before its record
    if not gpu_logs and run.record.hardware.gpus == 0:
        run.gpu.reason = "no GPU"
    elif " MIG " in (run.record.hardware.gpu or ""):  # NVIDIA A100-SXM4-40GB MIG 1g.5gb
        run.gpu.reason = "the job ran on MIG slices, and nvidia-smi logs the memory of whole GPUs"
    else:
        run.gpu = memory(run, "gpu", [read_gpu_log(path, restarts) for path in gpu_logs], nodes, ranks)
    run.cpu = memory(run, "cpu", [read_cpu_log(path, restarts) for path in cpu_logs], nodes, 1)


def memory(run: Run, kind: str, logs: list[MemoryLog], nodes: int, series_per_node: int) -> Memory:
    """Summary of one kind over the nodes; empty when a part of the job is not in the logs."""
    for log in logs:
        run.problems += log.gaps() + (short_of(log, run) if len(logs) <= nodes else [])
        if left_out := log.left_out():
            run.notes.append(f"{log.path.name}: {left_out}")
    reason = not_whole(run, kind, logs, nodes, series_per_node)
    if reason:
        run.problems.append(reason)
        return Memory(reason=reason)
    series = [samples for log in logs for samples in log.samples.values()]
    total = math.fsum(samples.total for samples in series)
    peak, minimum = max(samples.peak for samples in series), min(samples.minimum for samples in series)
    return Memory(peak, minimum, total / sum(map(len, series)))


def not_whole(run: Run, kind: str, logs: list[MemoryLog], nodes: int, expected: int) -> str:
    """What keeps these logs from telling about the whole job, empty when nothing does."""
    if not logs:
        return f"{run.folder}/{kind}_memory: no log of job {run.job_id}"
    more = math.inf if run.record.restarts else 0  # a job that was resumed may have had other nodes and GPUs before
    if run.has_record and not nodes <= len(logs) <= nodes + more:
        hosts = ", ".join(host_of(log.path) for log in logs)
        return f"{run.folder}/{kind}_memory: {len(logs)} log(s) ({hosts}) for {nodes} node(s)"
    for log in logs:
        if not log.samples:
            return f"{log.path}: no sample"
        if expected and not expected <= len(log.samples) <= expected + more:
            which = ", ".join(log.names())
            return f"{log.path}: GPU(s) {which} logged, the job ran on {expected} of that node"
    return ""


def short_of(log: MemoryLog, run: Run) -> list[str]:
    """A line when the log covers less than the training, up to two intervals at each end."""
    runtime = run.record.train.runtime_s
    span = log.span()
    if not runtime or span is None:
        return []
    interval = span / max(1, max(map(len, log.samples.values())) - 1)
    if span + 4 * max(interval, 1) >= runtime:
        return []
    return [f"{log.path}: it covers {span:.0f} s of a training of {runtime:.0f} s"]
