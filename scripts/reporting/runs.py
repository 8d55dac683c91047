"""Find the runs below some folders, and read their records and memory logs. Missing and damaged files are noted."""

import math
import os
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from job.end_of_job import ended_without_a_word, is_alive, reason_from_slurm
from job.memory_logs import MemoryLog, log_host, memory_log_paths, read_cpu_log, read_gpu_log
from records.schema import WITHOUT_A_WORD, Record, Restart, read_record
from reporting.trainer_log import (
    find_log,
    last_error,
    last_exception,
    last_lines,
    last_step,
    log_end,
    read_problem,
    read_summary,
)
from shared.errors import WorkshopError

OUTPUT_FOLDERS = {"results", "gpu_memory", "cpu_memory", "log", "output"}
NO_GPU = "no GPU"  # a reason for a missing value
GPU_FIELDS = ("callbacks.avg_", "energy", "gpu_activity")  # fields of the record that only a GPU can fill
INCOMPLETE = "incomplete"  # the status of a run without a readable record
NO_RECORD = Record(status="failed")


@dataclass(frozen=True)
class Missing:
    """A missing value, with the reason."""

    reason: str


@dataclass
class Memory:
    """GPU or CPU memory of a whole job, in MiB, over all its GPUs (for CPU memory, over all its nodes).

    peak, minimum: the largest and smallest sample of any GPU (node). mean: over time and GPUs (nodes).
    """

    peak: float
    minimum: float
    mean: float


NOT_LOGGED = Missing("the job ended before its training began")
NO_MEMORY = Missing("nvidia-smi reported no memory of the job's GPUs")
NO_JOB_SCRIPT = Missing("no job script started this run, so there is no memory log")


@dataclass(eq=False)
class ReportedRun:
    folder: Path
    job_id: str
    written: datetime  # time of the last write to the record (without a record, to the log)
    record: Record = NO_RECORD
    status: str = INCOMPLETE
    status_notes: list[str] = field(default_factory=list)  # details of the status, such as the exit code or a resume
    problems: list[str] = field(default_factory=list)  # reasons why numbers are missing or incomplete
    gpu: Memory | Missing = NOT_LOGGED
    cpu: Memory | Missing = NOT_LOGGED
    path: Path | None = None  # path of the record
    unreadable: bool = False  # the file that would say how the run ended cannot be read

    @property
    def experiment(self) -> str:
        """The experiment's folder relative to `experiments`, or only its name if it is not below such a folder.

        A command in another folder, such as that of the repository, has no experiment. Then this is its method.
        """
        if path := self.record.experiment:
            return path.removeprefix("experiments/") if "/" in path else self.method
        parts = self.folder.absolute().parts
        last = max((i for i, part in enumerate(parts) if part == "experiments"), default=len(parts) - 2)
        return "/".join(parts[last + 1 :])

    @property
    def strategy(self) -> str:
        audited = self.record.knobs.get("strategy")
        return str(audited.effective) if audited else "unknown strategy"

    @property
    def method(self) -> str:
        """The strategy, its offloaded parts, LoRA and the number of ranks, such as "ZeRO-2, LoRA 8, 2 ranks"."""
        offloaded = [
            name
            for name, knob in self.record.knobs.items()
            if name.endswith("offload") and knob.effective in ("cpu", True)
        ]
        ranks = "1 rank" if self.record.world_size == 1 else f"{self.record.world_size} ranks"
        lora = [f"LoRA {rank}"] if (rank := getattr(self.record.settings, "lora_rank", 0)) else []
        return ", ".join([self.strategy.removeprefix("DeepSpeed "), *offloaded, *lora, ranks])

    @property
    def has_record(self) -> bool:
        return self.record is not NO_RECORD

    @property
    def completed(self) -> bool:
        return self.status == "completed"

    @property
    def profiled(self) -> bool:
        """True if --profile slowed the run down, even if the run had too few steps for a profile."""
        return bool(self.record.settings.profile or self.record.profile)

    @property
    def model(self) -> str:
        """The model's name without folder or owner. It can be part of a table's file name."""
        return Path(self.record.settings.model_name or "").name

    @property
    def output(self) -> str:
        """The folder of the run's model. Like the paths of record and log, it is valid where the report is written."""
        return str(self.folder / self.record.output_dir) if self.record.output_dir else ""

    @property
    def sort_key(self) -> tuple:
        """Sort key: the start (without one, the time of the file), then the job id. Numeric job ids sort by value."""
        return self.record.started or self.written, len(self.job_id), self.job_id

    @property
    def outcome(self) -> str:
        """The status with its notes, such as "completed: attempt 2, resumed at step 4"."""
        return ": ".join(filter(None, [self.status, "; ".join(self.status_notes)]))

    def get(self, path: str) -> Any:
        """Return the value at a path such as ``train.runtime_s`` or ``eval.-1.loss``; a Missing if there is none."""
        value: Any = self.record
        for key in path.split("."):
            if isinstance(value, list):
                value = value[int(key)] if -len(value) <= int(key) < len(value) else None
            else:
                value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
        return self.explain_missing(path) if value is None else value

    def explain_missing(self, path: str) -> Missing:
        """Return the reason for the missing value at this path."""
        given = self.record.missing.get(path) or self.record.missing.get(path.split(".")[0])
        if given:
            return Missing(given)
        if path.startswith(GPU_FIELDS) and self.record.hardware.gpus == 0:
            return Missing(NO_GPU)
        return Missing("not measured" if self.completed else f"the run's status is {self.status}")

    def hours(self) -> float | Missing:
        """Return the hours of all parts of the job. A resumed job has several parts."""
        if not self.has_record:
            return Missing("no readable run record")
        seconds = 0.0
        parts: list[Record | Restart] = [self.record, *self.record.restarts]
        for part in parts:
            if not part.started or not part.finished:
                name = "the run" if part is self.record else "a part"
                return Missing(f"the end of {name} was not recorded")
            seconds += (part.finished - part.started).total_seconds()
        return seconds / 3600

    def gpu_hours(self) -> float | Missing:
        """Return the GPUs of the job times its hours."""
        hours = self.hours()
        if isinstance(hours, Missing):
            return hours
        return self.record.hardware.gpus * hours if self.record.hardware.gpus else Missing(NO_GPU)


def find_runs(folders: list[Path]) -> list[ReportedRun]:
    """Return all runs below the folders, oldest first. A folder may also be the `results` folder of an experiment."""
    runs = [run for place in run_folders(folders) for run in find_runs_in_folder(place)]
    add_resume_hints(runs)
    return sorted(runs, key=lambda run: run.sort_key)


def run_folders(folders: list[Path]) -> list[Path]:
    """Return all folders at and below these folders that may hold runs."""
    places = {top.parent for top in folders if top.name == "results"}
    for top in folders:
        for name, subfolders, _ in os.walk(top):
            places.add(Path(name))
            subfolders[:] = [s for s in subfolders if s not in OUTPUT_FOLDERS and not s.startswith(".")]
    return sorted(places)


def find_record(job_id: str, folders: list[Path]) -> Path:
    """Return the path of the run record with this id, or with this last part of it, below the folders.

    Raises WorkshopError if there is no such record or more than one.
    """
    places = list(dict.fromkeys(place.resolve() for place in run_folders(folders)))
    # A table shows only the end of a long id
    name = re.compile(rf"(.*[-_.])?{re.escape(job_id.strip('…. '))}\.json")
    records = (path for place in places for path in place.glob("results/*.json") if name.fullmatch(path.name))
    found = [Path(os.path.relpath(path)) for path in sorted(records)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(map(str, found))
        raise WorkshopError("--job", f"{len(found)} runs have the id {job_id}: {names}", "give the path of one")
    remedy = f"experiments/watch.sh {job_id} shows a job that waits, trains, or has ended before its training"
    raise WorkshopError("--job", f"no run record has the id {job_id}", remedy)


def find_runs_in_folder(folder: Path, starting: bool = False) -> list[ReportedRun]:
    """Return the runs of one folder. Some have a record, some only memory logs, and some only a job log.

    A job log without an error line is ignored in two cases: the job is still waiting or running, or its summary says
    "completed", because its program writes no record. With `starting`, a running job without a record is included.
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
        text = log_end(path)
        status, _ = read_summary(text)
        error = last_error(text)
        alive = not status and not error and is_alive(record_path(folder, job_id))
        if error or not (status == "completed" or alive):
            runs.append(run_without_record(folder, job_id, path))
        elif alive and starting:
            runs.append(ReportedRun(folder, job_id, last_written(path), status="running"))
    return runs


def record_path(folder: Path, job_id: str) -> Path:
    return folder / "results" / f"{job_id}.json"


def last_written(path: Path) -> datetime:
    """Return the time of the last write to a file, or to the link if the path is one. Now if the file has vanished."""
    try:
        return datetime.fromtimestamp(path.lstat().st_mtime, UTC)
    except OSError:
        return datetime.now(UTC)


def read_run(path: Path) -> ReportedRun:
    """Read a run from its record. If the record is unreadable, the run is incomplete; that is not an error."""
    run = ReportedRun(path.parent.parent, path.stem, last_written(path), path=path)
    log = find_log(run.folder, run.job_id)
    if problem := read_problem(log):
        run.problems.append(f"{log}: {problem}")
    try:
        run.record = read_record(path)
    except WorkshopError as error:
        run.problems.append(f"{path}: {error.what}")
        status, code = read_summary(log_end(log))
        run.unreadable = status in ("", "completed")
        if not run.unreadable:
            run.status = status
            run.status_notes.append(f"exit code {code}")
    else:
        run.job_id = run.record.job_id or run.job_id
        set_status(run)
    add_memory(run)
    return run


def set_status(run: ReportedRun) -> None:
    """Set the run's status and notes from its record.

    If the job has ended and its record still says `running`, the run has failed.
    """
    record = run.record
    assert run.path
    vanished = record.status in ("running", "failed") and ended_without_a_word(run.path, record)
    run.status = "failed" if vanished else record.status
    notes = run.status_notes
    text = "" if run.completed else log_end(find_log(run.folder, run.job_id))
    if run.status == "running" and (step := last_step(text)):
        notes.append(step)
    if record.stop:
        notes.append(f"{record.stop.signal} at step {record.stop.step}")
    elif run.status not in ("running", "completed"):
        code = WITHOUT_A_WORD if record.exit_code is None else f"exit code {record.exit_code}"
        notes.append(reason_from_slurm(run.job_id) if vanished else record.reason or code)
        # Show no error line for a stopped run: it may have several attempts, and the line may be from an earlier one.
        if run.status in ("stopped", "timeout"):
            notes.append("no checkpoint was saved at its end")
        elif error := last_error(text) or last_exception(text):
            if record.reason and record.reason in error:  # An error line is in the record and in the log.
                notes.clear()
            notes.append(error)
    start = f"resumed from {record.resumed_from}" if record.resumed_from else "from step 0"
    if steps := [str(restart.step) for restart in record.restarts if restart.step]:
        start = f"resumed at step {', '.join(steps)}"
    if record.attempt > 1:
        notes.append(f"attempt {record.attempt}, {start}")
    elif record.resumed_from:
        notes.append(start)
    if record.settings.torch_compile:
        notes.append("memory peaks include compilation")


def add_resume_hints(runs: list[ReportedRun]) -> None:
    """Note the checkpoint of each stopped run, unless one of these runs has already resumed from it."""
    resumed_from = {(run.folder, run.record.resumed_from) for run in runs}
    for run in runs:
        stop = run.record.stop
        if stop and (run.folder, stop.checkpoint) not in resumed_from:
            run.status_notes.append(f"resume with --resume_from_checkpoint {stop.checkpoint}")


def run_without_record(folder: Path, job_id: str, file: Path) -> ReportedRun:
    """Return the run of a job without a record. file: its job log or one of its memory logs."""
    run = ReportedRun(folder, job_id, last_written(file))
    log = find_log(folder, job_id)
    text = log_end(log)
    status, code = read_summary(text)
    problem = read_problem(log)
    run.unreadable = bool(problem) or status == "completed"
    if problem := problem or last_error(text):
        run.problems.append(f"{log}: {problem}")
    elif status in ("stopped", "timeout"):
        run.status = status
        run.status_notes += [f"exit code {code}", "before its training began"]
    elif (last := last_lines(text)) and not is_alive(record_path(folder, job_id)):
        run.problems.append(f"{log}: no run record; the end of the log: {last}")
    else:
        problem = "no run record; the training has not begun, or the job ended before it began"
        run.problems.append(f"{record_path(folder, job_id)}: {problem}")
    if any(memory_log_paths(folder, job_id)):
        add_memory(run)
    return run


def add_memory(run: ReportedRun) -> None:
    """Set the run's GPU and CPU memory from the memory logs of all nodes."""
    gpu_logs, cpu_logs = memory_log_paths(run.folder, run.job_id)
    hardware = run.record.hardware
    world_size, nodes = run.record.world_size or 0, len(run.record.nodes) or 1
    gpus = hardware.gpus or world_size
    if gpus < world_size:
        run.status_notes.append(f"{world_size // gpus} ranks share each GPU, so the GPU log has their sum")
    if not gpu_logs and hardware.gpus == 0:
        run.gpu = Missing(NO_GPU)
    elif " MIG " in (hardware.gpu or ""):  # NVIDIA A100-SXM4-40GB MIG 1g.5gb
        run.gpu = Missing("the job ran on MIG slices, and nvidia-smi logs the memory of whole GPUs")
    else:
        run.gpu = summarise_memory(run, "gpu", [read_gpu_log(path) for path in gpu_logs], gpus // nodes)
    run.cpu = summarise_memory(run, "cpu", [read_cpu_log(path) for path in cpu_logs], 1)


def summarise_memory(run: ReportedRun, kind: str, logs: list[MemoryLog], series_per_node: int) -> Memory | Missing:
    """Summarise the logs of all nodes. Returns a Missing if they do not cover all nodes and GPUs of the job.

    series_per_node: the expected number of GPUs (for CPU memory, 1) per log; 0 if unknown.
    """
    if not any(memory_log_paths(run.folder, run.job_id)) and not find_log(run.folder, run.job_id):
        return NO_JOB_SCRIPT
    for log in logs:
        run.problems += [*log.problems, *uncovered_time(log, run)]
    if reason := missing_part(run, kind, logs, series_per_node):
        run.problems.append(reason)
        return Missing(reason)
    samples = [mib for log in logs for name in log.samples for mib in log.mib(name)]
    return Memory(max(samples), min(samples), sum(samples) / len(samples)) if samples else NO_MEMORY


def missing_part(run: ReportedRun, kind: str, logs: list[MemoryLog], series_per_node: int) -> str:
    """Name the part of the job that is not in these logs. The text is empty if they cover the whole job."""
    if not logs:
        return f"{run.folder}/{kind}_memory: no log of job {run.job_id}"
    nodes = len(run.record.nodes) or 1
    more = math.inf if run.record.attempt > 1 else 0  # An earlier attempt may have used other nodes and GPUs.
    if run.has_record and not nodes <= len(logs) <= nodes + more:
        hosts = ", ".join(log_host(log.path) for log in logs)
        return f"{run.folder}/{kind}_memory: {len(logs)} log(s) ({hosts}) for {nodes} node(s)"
    for log in logs:
        if not log.samples:
            return f"{log.path}: no sample"
        if series_per_node and not series_per_node <= len(log.samples) <= series_per_node + more:
            gpus = ", ".join(log.names())
            return f"{log.path}: GPU(s) {gpus} logged, but the job ran on {series_per_node} GPU(s) of this node"
    return ""


def uncovered_time(log: MemoryLog, run: ReportedRun) -> list[str]:
    """Return a problem if the log covers less than the training. Two intervals at each end may be missing."""
    train = run.record.train
    # After a resume, the runtime is the sum over all jobs of this training, and the log covers only this job.
    if not train or not train.runtime_s or not log.samples or run.record.resumed_from:
        return []
    interval = log.span() / max(1, max(map(len, log.samples.values())) - 1)
    if log.span() + 4 * max(interval, 1) >= train.runtime_s:
        return []
    return [f"{log.path}: it covers {log.span():.0f} s of a training run of {train.runtime_s:.0f} s"]
