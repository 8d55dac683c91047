"""Read the state of a class: the jobs of each participant's clone in each experiment.

The states come from run records, from the ends of logs, and from Slurm's queue, because a waiting job has no file.
"""

import os
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from job.end_of_job import queued_jobs
from reporting.runs import ReportedRun, add_resume_hints, find_runs_in_folder
from shared.errors import WorkshopError, did_you_mean
from shared.paths import EXPERIMENTS

# A folder that did not change for this time is not read again. Clocks differ, and file servers report changes late.
UNCHANGED_S = 60
Queue = dict[str, dict[str, str]]  # jobs in Slurm's queue, by id


@dataclass
class ClassCell:
    """The jobs of one participant in one experiment, oldest first. problem: why a part of them cannot be read."""

    experiment: str
    jobs: list[ReportedRun] = field(default_factory=list)
    problem: str = ""

    @property
    def run(self) -> ReportedRun | None:
        """The job that decides the cell's state: the latest completed one, otherwise the newest."""
        candidates = [job for job in self.jobs if job.completed] or self.jobs
        return candidates[-1] if candidates else None

    @property
    def newer(self) -> ReportedRun | None:
        """The newest job, if it is newer than the one that decides the state."""
        return self.jobs[-1] if self.jobs and self.jobs[-1] is not self.run else None


@dataclass
class Participant:
    """A row of the class. name: the part of the clone's path that differs. problem: why the clone cannot be read."""

    name: str
    clone: Path
    cells: list[ClassCell] = field(default_factory=list)
    problem: str = ""

    @property
    def runs(self) -> list[ReportedRun]:
        return [job for cell in self.cells for job in cell.jobs]


@dataclass
class FolderState:
    """The runs of an experiment's folder when it was read last. changed: modification times of its subfolders."""

    changed: list[int]
    settled: bool
    runs: list[ReportedRun]
    problem: str


class ClassReader:
    """Read the clones again and again. Folders in which nothing has changed are not read again."""

    def __init__(self, folders: list[Path], experiments: list[str]):
        clones = [folder.parent if folder.name == "experiments" else folder for folder in map(Path.absolute, folders)]
        self.clones = list(dict.fromkeys(clones))
        self.names = distinct_names(self.clones)
        self.experiments = experiments
        self.folders: dict[Path, FolderState] = {}
        self.slurm_answers = True

    def read(self) -> list[Participant]:
        """Return the participants in the order of their folders."""
        queued_jobs.cache_clear()  # the answer for the last refresh
        queue = queued_jobs()
        self.slurm_answers = queue is not None
        by_folder: dict[str, Queue] = defaultdict(dict)
        for job_id, job in (queue or {}).items():
            by_folder[job["folder"]][job_id] = job
        return [self.read_clone(*each, by_folder) for each in zip(self.clones, self.names, strict=True)]

    def read_clone(self, clone: Path, name: str, queue: dict[str, Queue]) -> Participant:
        participant = Participant(name, clone)
        try:
            os.listdir(clone / "experiments")
        except FileNotFoundError:
            participant.problem = "there is no such folder" if not clone.is_dir() else "it holds no folder experiments"
        except OSError as error:
            participant.problem = f"{error.strerror}"
        if participant.problem:
            return participant
        # Slurm reports the path without symbolic links
        real = os.path.realpath(clone / "experiments")
        for experiment in self.experiments:
            folder = clone / "experiments" / experiment
            state = self.read_folder(folder)
            queued = queue.get(f"{real}/{experiment}", {}) | queue.get(str(folder), {})
            participant.cells.append(ClassCell(experiment, add_queued_jobs(folder, state.runs, queued), state.problem))
        return participant

    def read_folder(self, folder: Path) -> FolderState:
        """Return the runs of a folder.

        A job changes a subfolder's time when it begins, replaces its record, and ends. In between, it only appends to
        its files, so a folder with a running job is read each time.
        """
        changed = [modified(folder / name) for name in ("results", "results/jobs", "log")]
        known = self.folders.get(folder)
        if known and known.settled and known.changed == changed:
            return known
        state = FolderState(changed, False, [], "")
        if any(changed):
            state.problem = unreadable_part(folder)
            state.runs = find_runs_in_folder(folder, starting=True)
            add_resume_hints(state.runs)
            state.runs.sort(key=lambda run: run.sort_key)
        running = any(run.status == "running" for run in state.runs)
        state.settled = not running and max(changed) < (time.time() - UNCHANGED_S) * 1e9
        self.folders[folder] = state
        return state


def modified(folder: Path) -> int:
    """Return the modification time of a folder in ns, or 0 if there is none."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def unreadable_part(folder: Path) -> str:
    """Name a subfolder that cannot be read, with the reason. Otherwise its jobs would look as if they did not exist."""
    for name in ("results", "log"):
        try:
            os.listdir(folder / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def add_queued_jobs(folder: Path, runs: list[ReportedRun], queue: Queue) -> list[ReportedRun]:
    """Return the runs with the states that only Slurm knows: waiting, and running before there is a record."""
    jobs = []
    for run in runs:
        queued = queue.get(run.job_id)
        if queued and queued["state"] == "PENDING":  # a restarted job still has its earlier record
            run = queued_run(folder, run.job_id, queued)
        elif queued and queued["state"] == "RUNNING" and not run.record.finished:
            run = replace(run, status="running")
        jobs.append(run)
    known = {run.job_id for run in runs}
    jobs += [queued_run(folder, job_id, queued) for job_id, queued in queue.items() if job_id not in known]
    return sorted(jobs, key=lambda job: (job.status == "waiting", job.sort_key))


def queued_run(folder: Path, job_id: str, queued: dict[str, str]) -> ReportedRun:
    run = ReportedRun(folder, job_id, datetime.now(UTC), status="running")
    if queued["state"] == "PENDING":
        run.status = "waiting"
        run.status_notes.append(queued["reason"])
    return run


def distinct_names(folders: list[Path]) -> list[str]:
    """Return the part of each path that differs from the other paths: /home/alice/workshop -> alice."""
    parts = [folder.parts for folder in folders]
    both_ways = (parts, [path[::-1] for path in parts])
    start, end = (len(os.path.commonprefix(each)) for each in both_ways)  # noqa: RUF071 - of tuples, it compares parts
    return ["/".join(path[start : len(path) - end]) or path[-1] for path in parts]


def select_experiments(words: list[str], source: str = "--experiments") -> list[str]:
    """Return the folders with experiments at and below these paths or patterns, which are relative to experiments/.

    Raises WorkshopError (exit code 2) for a path without an experiment. source: the flag or file with the paths.
    """
    found: list[str] = []
    for word in words:
        top = word.removeprefix("experiments/").strip("/")
        scripts = sorted(EXPERIMENTS.glob(f"{top}/**/*.slurm")) if top else []
        if not scripts:
            known = sorted({path.parent.relative_to(EXPERIMENTS).as_posix() for path in EXPERIMENTS.rglob("*.slurm")})
            remedy = did_you_mean(word, known, "give folders below experiments/, such as ddp or ddp/2_gpus")
            raise WorkshopError(source, f"{word} holds no experiment", remedy)
        found += [script.parent.relative_to(EXPERIMENTS).as_posix() for script in scripts]
    return list(dict.fromkeys(found))
