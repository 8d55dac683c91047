"""The runs below some folders: their records, what their memory logs say, and what is missing or damaged."""

import math
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from job.end_of_job import ended_without_a_word, is_alive, reason_from_slurm
from records.memory_logs import MemoryLog, log_host, memory_log_paths, read_cpu_log, read_gpu_log
from records.schema import WITHOUT_A_WORD, Record, Restart, read_record
from reporting.trainer_log import error_in, last_lines, log_of, summary_in
from shared.errors import WorkshopError

FOLDERS = {"results", "gpu_memory", "cpu_memory", "log", "output"}
NO_GPU = "no GPU"  # why a value is missing
INCOMPLETE = "incomplete"  # the status of a run without a record that can be read
NO_RECORD = Record(status="failed")


@dataclass(frozen=True)
class Missing:
    """Why there is no value."""

    reason: str


@dataclass
class Memory:
    """One kind of memory over a whole job, in MiB: over all its GPUs, or over all its nodes.

    peak, minimum: of any GPU (node) at any time; mean: over time and GPUs (nodes).
    """

    peak: float
    minimum: float
    mean: float


NOT_LOGGED = Missing("the job ended before its training began")


@dataclass(eq=False)
class Run:
    folder: Path
    job_id: str
    written: datetime  # when its record, or the log that is all of it, was last written
    record: Record = NO_RECORD
    status: str = INCOMPLETE
    status_notes: list[str] = field(default_factory=list)  # how it ended, and that it was resumed
    problems: list[str] = field(default_factory=list)  # what makes its numbers incomplete
    gpu: Memory | Missing = NOT_LOGGED
    cpu: Memory | Missing = NOT_LOGGED
    path: Path | None = None  # of its record

    @property
    def experiment(self) -> str:
        """Folder of the experiment as seen from the last `experiments` above it; without one, its own name."""
        if self.record.experiment:
            return self.record.experiment.removeprefix("experiments/")
        parts = self.folder.absolute().parts
        last = max((i for i, part in enumerate(parts) if part == "experiments"), default=len(parts) - 2)
        return "/".join(parts[last + 1 :])

    @property
    def has_record(self) -> bool:
        return self.record is not NO_RECORD

    @property
    def completed(self) -> bool:
        return self.status == "completed"

    @property
    def profiled(self) -> bool:
        """Whether --profile slowed it down; a run of too few steps has no profile for it."""
        return bool(self.record.settings.profile or self.record.profile)

    @property
    def model(self) -> str:
        """Its name without the folder or the owner: a table may be named after it."""
        return Path(self.record.settings.model_name or "").name

    @property
    def order(self) -> tuple:
        """Sorts runs by their start, without one by the time of their file; job ids of numbers by their value."""
        return self.record.started or self.written, len(self.job_id), self.job_id

    @property
    def ended(self) -> str:
        """The status with all that is to be said about it."""
        return ": ".join(filter(None, [self.status, "; ".join(self.status_notes)]))

    def get(self, path: str) -> Any:
        """Value at a path such as ``train.runtime_s`` or ``eval.-1.loss``, or why there is none."""
        value: Any = self.record
        for key in path.split("."):
            if isinstance(value, list):
                value = value[int(key)] if -len(value) <= int(key) < len(value) else None
            else:
                value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
        return self.missing(path) if value is None else value

    def missing(self, path: str) -> Missing:
        """Why there is no value at this path."""
        given = self.record.missing.get(path) or self.record.missing.get(path.split(".")[0])
        if given:
            return Missing(given)
        if not self.completed:
            return Missing(f"the run's status is {self.status}")
        of_gpu = path.startswith("callbacks.avg_") and self.record.hardware.gpus == 0
        return Missing(NO_GPU if of_gpu else "not measured")

    def gpu_hours(self) -> float | Missing:
        """GPUs of the job x hours from the start of each of its parts to the part's end."""
        if not self.has_record:
            return Missing("no run record that can be read")
        seconds = 0.0
        parts: list[Record | Restart] = [self.record, *self.record.restarts]
        for part in parts:
            if not part.started or not part.finished:
                which = "its end" if part is self.record else "the end of a part"
                return Missing(f"{which} was not recorded")
            seconds += (part.finished - part.started).total_seconds()
        if not self.record.hardware.gpus:
            return Missing(NO_GPU)
        return self.record.hardware.gpus * seconds / 3600


def find_runs(folders: list[Path]) -> list[Run]:
    """All runs below the folders, oldest first. A given folder may also be the one that holds the records."""
    places = {top.parent for top in folders if top.name == "results"}
    for top in folders:
        for name, subfolders, _ in os.walk(top):
            places.add(Path(name))
            subfolders[:] = [s for s in subfolders if s not in FOLDERS and not s.startswith(".")]
    runs = [run for place in sorted(places) for run in runs_in(place)]
    note_how_to_resume(runs)
    return sorted(runs, key=lambda run: run.order)


def runs_in(folder: Path) -> list[Run]:
    """The runs of one folder. A run has a record, or only memory logs, or only a log.

    A log counts unless its job still waits or runs, or its summary says that a program without a record completed.
    """
    runs = [read_run(path) for path in sorted(folder.glob("results/*.json"))]
    memory_logs = [*folder.glob("cpu_memory/cpu_memory_log_*.txt"), *folder.glob("gpu_memory/gpu_memory_log_*.csv")]
    for path in sorted(memory_logs):
        name = path.stem.split("_", 3)[3]
        if not any(name == run.job_id or name.startswith(f"{run.job_id}_") for run in runs):
            runs.append(run_without_record(folder, name.split("_")[0], path))
    known = [run.job_id for run in runs]
    for path in sorted(folder.glob("log/*_*.out")):
        if any(path.stem.endswith(f"_{job_id}") for job_id in known):
            continue
        job_id = path.stem.rpartition("_")[2]
        status, _ = summary_in(path)
        if error_in(path) or not (status == "completed" or (not status and is_alive(record_path(folder, job_id)))):
            runs.append(run_without_record(folder, job_id, path))
    return runs


def record_path(folder: Path, job_id: str) -> Path:
    return folder / "results" / f"{job_id}.json"


def last_written(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


def read_run(path: Path) -> Run:
    """The run of a record. A record that cannot be read makes an incomplete run, not an error."""
    run = Run(path.parent.parent, path.stem, last_written(path), path=path)
    try:
        run.record = read_record(path)
    except WorkshopError as error:
        run.problems.append(f"{path}: {error.what}")
    else:
        run.job_id = run.record.job_id or run.job_id
        set_status(run)
    add_memory(run)
    return run


def set_status(run: Run) -> None:
    """Take the run's status from its record. A run that has ended with the status `running` has failed."""
    record = run.record
    assert run.path
    gone = record.status in ("running", "failed") and ended_without_a_word(run.path, record)
    run.status = "failed" if gone else record.status
    notes = run.status_notes
    if record.stop:
        notes.append(f"{record.stop.signal} at step {record.stop.step}")
    elif run.status not in ("running", "completed"):
        code = WITHOUT_A_WORD if record.exit_code is None else f"exit code {record.exit_code}"
        notes.append(reason_from_slurm(run.job_id) if gone else record.reason or code)
        # a run that was stopped may have begun several times: the line would be another attempt's
        if run.status in ("stopped", "timeout"):
            notes.append("no checkpoint of its end")
        elif error := error_in(log_of(run.folder, run.job_id)):
            if record.reason and record.reason in error:  # the watchdog's
                notes.clear()
            notes.append(error)
    begun = f"resumed from {record.resumed_from}" if record.resumed_from else "from step 0"
    if steps := [str(restart.step) for restart in record.restarts if restart.step]:
        begun = f"resumed at step {', '.join(steps)}"
    if record.attempt > 1:
        notes.append(f"attempt {record.attempt}, {begun}")
    elif record.resumed_from:
        notes.append(begun)
    if record.settings.torch_compile:
        notes.append("memory peaks hold the compilation")


def note_how_to_resume(runs: list[Run]) -> None:
    """Name the checkpoint of each run that was stopped, unless one of these runs has resumed from it."""
    resumed_from = {(run.folder, run.record.resumed_from) for run in runs}
    for run in runs:
        stop = run.record.stop
        if stop and (run.folder, stop.checkpoint) not in resumed_from:
            run.status_notes.append(f"go on with --resume_from_checkpoint {stop.checkpoint}")


def run_without_record(folder: Path, job_id: str, left: Path) -> Run:
    """The run of a job that has left memory logs or a log, but no record. The log says how it ended."""
    run = Run(folder, job_id, last_written(left))
    log = log_of(folder, job_id)
    status, code = summary_in(log)
    if refused := error_in(log):
        run.problems.append(f"{log}: {refused}")
    elif status in ("stopped", "timeout"):
        run.status = status
        run.status_notes += [f"exit code {code}", "before its training began"]
    elif (last := last_lines(log)) and not is_alive(record_path(folder, job_id)):
        run.problems.append(f"{log}: no run record; the log ends with: {last}")
    else:
        what = "no run record, the training has not begun, or the job ended before"
        run.problems.append(f"{record_path(folder, job_id)}: {what}")
    if any(memory_log_paths(folder, job_id)):
        add_memory(run)
    return run


def add_memory(run: Run) -> None:
    """Fill in what the memory logs of all nodes say."""
    gpu_logs, cpu_logs = memory_log_paths(run.folder, run.job_id)
    hardware = run.record.hardware
    ranks = (run.record.world_size or 0) // (len(run.record.nodes) or 1)
    if not gpu_logs and hardware.gpus == 0:
        run.gpu = Missing(NO_GPU)
    elif " MIG " in (hardware.gpu or ""):  # NVIDIA A100-SXM4-40GB MIG 1g.5gb
        run.gpu = Missing("the job ran on MIG slices, and nvidia-smi logs the memory of whole GPUs")
    else:
        run.gpu = summarise_memory(run, "gpu", [read_gpu_log(path) for path in gpu_logs], ranks)
    run.cpu = summarise_memory(run, "cpu", [read_cpu_log(path) for path in cpu_logs], 1)


def summarise_memory(run: Run, kind: str, logs: list[MemoryLog], series_per_node: int) -> Memory | Missing:
    """Summary of one kind over the nodes, or which part of the job is not in the logs."""
    for log in logs:
        run.problems += [*log.problems, *uncovered_time(log, run)]
    if reason := missing_part(run, kind, logs, series_per_node):
        run.problems.append(reason)
        return Missing(reason)
    samples = [mib for log in logs for name in log.samples for mib in log.mib(name)]
    return Memory(max(samples), min(samples), sum(samples) / len(samples))


def missing_part(run: Run, kind: str, logs: list[MemoryLog], series_per_node: int) -> str:
    """Say which part of the job is not in these logs; empty when they hold the whole job."""
    if not logs:
        return f"{run.folder}/{kind}_memory: no log of job {run.job_id}"
    nodes = len(run.record.nodes) or 1
    more = math.inf if run.record.attempt > 1 else 0  # other nodes and GPUs may have been in use before
    if run.has_record and not nodes <= len(logs) <= nodes + more:
        hosts = ", ".join(log_host(log.path) for log in logs)
        return f"{run.folder}/{kind}_memory: {len(logs)} log(s) ({hosts}) for {nodes} node(s)"
    for log in logs:
        if not log.samples:
            return f"{log.path}: no sample"
        if series_per_node and not series_per_node <= len(log.samples) <= series_per_node + more:
            which = ", ".join(log.names())
            return f"{log.path}: GPU(s) {which} logged, the job ran on {series_per_node} of that node"
    return ""


def uncovered_time(log: MemoryLog, run: Run) -> list[str]:
    """Return a line when the log covers less than the training. Two intervals at each end may be missing."""
    train = run.record.train
    if not train or not train.runtime_s or not log.samples:
        return []
    if run.record.resumed_from:
        return []  # the runtime is that of all jobs of this training, the log covers only this one
    interval = log.span() / max(1, max(map(len, log.samples.values())) - 1)
    if log.span() + 4 * max(interval, 1) >= train.runtime_s:
        return []
    return [f"{log.path}: it covers {log.span():.0f} s of a training of {train.runtime_s:.0f} s"]
