"""The runs below some folders: their records, what their memory logs say, and what is missing or damaged."""

import json
import math
import os
import subprocess
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from reporting.memory_logs import MemoryLog, host_of, logs_of, read_cpu_log, read_gpu_log

SCHEMA = 1
FOLDERS = {"results", "gpu_memory", "cpu_memory", "log", "output"}
MANY = 50  # runs from which on a second core pays
ENDED_ABNORMALLY = ("failed", "oom", "timeout", "stopped")


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
    record: dict
    status: str
    status_note: str = ""
    problems: list[str] = field(default_factory=list)  # what makes its numbers incomplete
    gpu: Memory = field(default_factory=Memory)
    cpu: Memory = field(default_factory=Memory)

    @property
    def experiment(self) -> str:
        """Folder of the experiment below experiments/."""
        return text(self.record, "experiment").removeprefix("experiments/") or name_of(self.folder)

    @property
    def completed(self) -> bool:
        return self.status == "completed"

    @property
    def model(self) -> str:
        return text(self.get("settings") or {}, "model_name")

    @property
    def order(self) -> tuple:
        """Sorts runs by their start; job ids of numbers by their value."""
        return text(self.record, "started"), len(self.job_id), self.job_id

    @property
    def shown_status(self) -> str:
        return f"{self.status}, incomplete" if self.problems and self.status != "incomplete" else self.status

    def get(self, path: str) -> Any:
        """Value at a path such as ``train.runtime_s`` or ``eval.-1.loss``, None where there is none."""
        value: Any = self.record
        for key in path.split("."):
            if isinstance(value, list) and key.lstrip("-").isdigit():
                value = value[int(key)] if -len(value) <= int(key) < len(value) else None
            else:
                value = value.get(key) if isinstance(value, dict) else None
        return value

    def number(self, path: str) -> float | int | None:
        value = self.get(path)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def why_missing(self, path: str) -> str:
        """Why there is no value at this path."""
        missing = self.get("missing") or {}
        for name in (path, path.split(".")[0]):
            if isinstance(missing, dict) and missing.get(name):
                return str(missing[name])
        if not self.completed:
            return f"the run's status is {self.status}"
        if path.startswith("callbacks.avg_") and self.number("hardware.gpus") == 0:
            return "no GPU"
        return "not measured" if self.get(path) is None else f"the record's {path} is no number"

    def gpu_hours(self) -> tuple[float | None, str]:
        """GPUs of the job x hours from the record's start to its end, or the reason why they are not known."""
        gpus = self.number("hardware.gpus")
        try:
            ended = datetime.fromisoformat(text(self.record, "finished"))
            seconds = (ended - datetime.fromisoformat(text(self.record, "started"))).total_seconds()
        except (ValueError, TypeError):
            return None, "its end was not recorded"
        if not gpus:
            return None, "no GPU"
        return gpus * seconds / 3600, ""


def text(content: dict, key: str) -> str:
    return content[key] if isinstance(content.get(key), str) else ""


def name_of(folder: Path) -> str:
    """The folder as seen from the last `experiments` above it, else its own name."""
    parts = folder.absolute().parts
    last = max((i for i, part in enumerate(parts) if part == "experiments"), default=len(parts) - 2)
    return "/".join(parts[last + 1 :])


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """All runs below the folders, oldest first."""
    records: list[Path] = []
    logs: dict[tuple[Path, str], None] = {}
    for top in folders:
        for folder, subfolders, _ in os.walk(top):
            here = Path(folder)
            records += here.glob("results/*.json")
            logs |= logged_jobs(here)
            if here.name == "results" and here == Path(top):
                records += here.glob("*.json")
            subfolders[:] = sorted(s for s in subfolders if s not in FOLDERS and not s.startswith("."))
    runs = read_all(sorted(set(records)))
    known = {(run.folder, run.job_id) for run in runs}
    runs += [run_without_record(*job) for job in sorted(logs) if job not in known]
    return sorted(runs, key=lambda run: run.order)


def read_all(paths: list[Path]) -> list[Run]:
    if len(paths) < MANY:
        return [read_run(path) for path in paths]
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(read_run, paths, chunksize=8))


def logged_jobs(folder: Path) -> dict[tuple[Path, str], None]:
    """(folder, job id) of each job that left a memory log here."""
    logs = [*folder.glob("gpu_memory/gpu_memory_log_*.csv"), *folder.glob("cpu_memory/cpu_memory_log_*.txt")]
    return dict.fromkeys((folder, path.stem.split("_")[3]) for path in logs)


def read_run(path: Path) -> Run:
    """The run of a record. A record that cannot be read makes an incomplete run, not an error."""
    run = Run(path.parent.parent, path.stem, {}, "incomplete")
    try:
        run.record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(run.record, dict) or not {"status", "settings"} <= run.record.keys():
            run.record = {}
            raise ValueError("no settings in it")
    except OSError as error:
        run.problems.append(f"{path}: {error.strerror}")
    except json.JSONDecodeError as error:
        run.problems.append(f"{path}: is no run record (line {error.lineno}: {error.msg})")
    except ValueError as error:
        run.problems.append(f"{path}: is no run record ({error})")
    else:
        run.job_id = text(run.record, "job_id") or run.job_id
        settle(run, path)
    add_memory(run)
    return run


def settle(run: Run, path: Path) -> None:
    """Status of a run from its record; one that says `running` and is not has failed."""
    run.status = str(run.record["status"])
    if run.record.get("schema") != SCHEMA:
        run.problems.append(f"{path}: schema {run.record.get('schema')}, this report knows {SCHEMA}")
    if run.status == "running" and not alive(run):
        run.status = "failed"
        run.status_note = "the record still says running, but its job is gone"
    elif run.status in ENDED_ABNORMALLY and run.record.get("exit_code") is not None:
        run.status_note = f"exit code {run.record['exit_code']}"


def run_without_record(folder: Path, job_id: str) -> Run:
    run = Run(folder, job_id, {}, "incomplete")
    what = "no run record, the training has not begun, or the job ended before"
    run.problems.append(f"{folder}/results/{job_id}.json: {what}")
    add_memory(run)
    return run


def alive(run: Run) -> bool:
    """Whether the job of a record that says `running` exists: in Slurm's queue, or as a process of this machine."""
    if run.job_id in queued_jobs():
        return True
    process = Path(f"/proc/{run.record.get('pid')}/cmdline")
    here = run.get("nodes.0") == os.uname().nodename
    return here and process.exists() and b"train.py" in process.read_bytes()


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
    nodes = len(run.get("nodes") or [0])
    ranks = int(run.number("world_size") or 0) // nodes
    if not gpu_logs and run.number("hardware.gpus") == 0:
        run.gpu.reason = "no GPU"
    elif " MIG " in str(run.get("hardware.gpu")):  # NVIDIA A100-SXM4-40GB MIG 1g.5gb
        run.gpu.reason = "the job ran on MIG slices, and nvidia-smi logs the memory of whole GPUs"
    else:
        run.gpu = memory(run, "gpu", [read_gpu_log(path) for path in gpu_logs], nodes, ranks)
    run.cpu = memory(run, "cpu", [read_cpu_log(path) for path in cpu_logs], nodes, 1)


def memory(run: Run, kind: str, logs: list[MemoryLog], nodes: int, series_per_node: int) -> Memory:
    """Summary of one kind over the nodes; empty when a part of the job is not in the logs."""
    for log in logs:
        run.problems += log.gaps() + short_of(log, run)
    reason = not_whole(run, kind, logs, nodes, series_per_node)
    if reason:
        run.problems.append(reason)
        return Memory(reason=reason)
    series = [samples for log in logs for samples in log.samples.values()]
    total = math.fsum(sum(samples) for samples in series)
    count = sum(map(len, series))
    return Memory(max(map(max, series)), min(map(min, series)), total / count)


def not_whole(run: Run, kind: str, logs: list[MemoryLog], nodes: int, expected: int) -> str:
    """What keeps these logs from telling about the whole job, empty when nothing does."""
    if not logs:
        return f"{run.folder}/{kind}_memory: no log of job {run.job_id}"
    if len(logs) != nodes and run.record:
        hosts = ", ".join(host_of(log.path) for log in logs)
        return f"{run.folder}/{kind}_memory: {len(logs)} log(s) ({hosts}) for {nodes} node(s)"
    for log in logs:
        if not log.samples:
            return f"{log.path}: no sample"
        if expected and len(log.samples) != expected:
            which = ", ".join(log.names())
            return f"{log.path}: GPU(s) {which} logged, the job ran on {expected} of that node"
    return ""


def short_of(log: MemoryLog, run: Run) -> list[str]:
    """A line when the log covers less than the training, up to two intervals at each end."""
    runtime = run.number("train.runtime_s")
    span = log.span()
    if not runtime or span is None:
        return []
    interval = span / max(1, max(map(len, log.samples.values())) - 1)
    if span + 4 * max(interval, 1) >= runtime:
        return []
    return [f"{log.path}: it covers {span:.0f} s of a training of {runtime:.0f} s"]
