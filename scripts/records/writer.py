"""Filling and writing the run record ``results/<job_id>.json``; records/schema.py describes it."""

import contextlib
import fcntl
import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from distributed.collectives import gather_lists, rank, value_of_rank_0
from distributed.process_group import exit_code, is_out_of_memory
from records.git_state import git_state
from records.schema import (
    SCHEMA,
    WITHOUT_A_WORD,
    Record,
    change_record,
    close_record,
    now,
    outcome,
    read_record,
    write_record,
)
from shared.errors import ENVIRONMENT, WorkshopError, whole_number
from shared.paths import REPOSITORY, workshop_version

PACKAGES = ["torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers"]


def new_job_id() -> str:
    """The job's id, equal on all ranks: JOB_ID, else Slurm's, else local-<time>-<pid>.

    Raises WorkshopError (exit code 2) for one that cannot be part of a file's name.
    """
    local = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    job_id = os.environ.get("JOB_ID") or os.environ.get("SLURM_JOB_ID") or local
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", job_id):  # as job.sh
        raise WorkshopError("JOB_ID", f"{job_id!r:.80} cannot name files", "give up to 64 letters, digits, . _ or -")
    return value_of_rank_0(job_id)


def restarted_by_slurm() -> bool:
    """Whether this job was requeued: it has run before, under the same id."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


@contextlib.contextmanager
def sole_writer(job_id: str) -> Iterator[None]:
    """Holds a lock on the run's files, which ends with the process, however it ends.

    Raises WorkshopError (exit code 2) on rank 0 while another process holds it.
    """
    if rank() != 0:
        yield
        return
    path = Path("results") / f".{job_id}" / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise WorkshopError(path, f"cannot be written ({error.strerror})", "free disk space", ENVIRONMENT) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WorkshopError(
                "JOB_ID", f"another run of {job_id} is writing its files", "give another one, or wait for its end"
            ) from error
        except OSError:  # a file system without locks
            print(f"{path}: no locks on this file system, start no second run of {job_id}", flush=True)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
                path.parent.rmdir()  # unless job.sh keeps its own files there


class RunRecord:
    """A dict on every rank, a file of rank 0.

    As a context manager it refuses a second run of the same job id, and notes how this one ended.
    """

    def __init__(self, job_id: str, folder: str = "results"):
        self.path = Path(folder) / f"{job_id}.json"
        self.content: dict = {
            "schema": SCHEMA,
            "status": "running",
            "exit_code": None,
            "job_id": job_id,
            "attempt": whole_number("ATTEMPT", "1"),  # job.sh's: one that ended before its record counts, too
            "restarts": [],
            "missing": {},
        }
        self.held = contextlib.ExitStack()

    def start(self, step: int, **values: object) -> None:
        """Write the record for the first time. Collective: every rank adds its host name.

        step: that the run goes on from, 0 from the beginning.
        """
        hosts = [host for (host,) in gather_lists([socket.gethostname()])]
        if rank() == 0 and self.path.exists():
            before = read_record(self.path)
            self.content["attempt"] = max(self.content["attempt"], before.attempt + 1)
            restart = {"time": now(), "reason": how_it_ended(before), "step": step}
            restart |= {"started": before.started, "finished": before.finished}
            self.content["restarts"] = [*before.restarts, restart]
        self.content |= {
            "experiment": experiment_path(),
            "command": [from_repository(word) for word in sys.argv],
            "started": now(),
            "finished": None,
            "stop": None,
            "overrides": [text for text in os.environ.get("JOB_OVERRIDES", "").split(";") if text],
            "nodes": list(dict.fromkeys(hosts)),
            "pid": os.getpid(),
            "world_size": len(hosts),
            "hardware": hardware(len(hosts)),
            "git": git_state() if rank() == 0 else None,
            "bandwidth": bandwidth(),
            "versions": versions(),
            **values,
        }
        settings = self.content.get("settings", {})
        self.content["settings"] = {flag: from_repository(value) for flag, value in settings.items()}
        self.write()

    def update(self, **values: object) -> None:
        self.content |= values
        self.write()

    def missing(self, name: str, reason: str) -> None:
        """Leave `name` empty, and say why."""
        self.content["missing"][name] = reason
        self.update(**{name: None})

    def write(self) -> None:
        if rank() != 0:
            return
        on_disk = read_record(self.path) if self.path.exists() else None
        if on_disk and on_disk.attempt > self.content["attempt"]:
            return  # the job has begun again, while this process outlived it
        if on_disk and on_disk.attempt == self.content["attempt"] and self.content["status"] == "running":
            # job.sh notes a signal, or the end, while this process still saves; its own end will count
            self.content |= {name: getattr(on_disk, name) for name in ("status", "exit_code", "finished")}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_record(self.path, Record.model_validate(self.content))
        except OSError as error:
            raise WorkshopError(
                self.path, f"cannot be written ({error.strerror})", "free disk space or quota", ENVIRONMENT
            ) from error

    def training(self, trainer, metrics: dict, speed, utilisation, held) -> None:
        """Note what the Trainer reports at the end of a training, and what the callbacks measured. Collective."""
        self.measure_memory()
        self.note_held(held.bytes)
        measured = speed.measured()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        self.update(
            train={
                "steps": trainer.state.global_step,
                "loss_mean": metrics["train_loss"],
                "loss_last": losses[-1] if losses else None,
                "runtime_s": metrics["train_runtime"],
                "samples_per_second": metrics["train_samples_per_second"],
                "steps_per_second": metrics["train_steps_per_second"],
                **measured,
            }
        )
        means = {
            "train/steps_per_second_mean": measured["steady_steps_per_second"],
            "train/samples_per_second_mean": measured["steady_samples_per_second"],
        }
        if utilisation.reason:
            self.content["missing"]["callbacks.avg_gpu_util_%"] = utilisation.reason
        if measured["warm_up_seconds"] is None:
            self.content["missing"]["train.warm_up_seconds"] = "too few steps for a warm-up"
        if not measured["steady_steps"]:
            for name in ("steady_samples_per_second", "steady_tokens_per_second", "mfu_percent"):
                self.content["missing"].setdefault(f"train.{name}", "too few steps after the warm-up")
        elif measured["mfu_percent"] is None:
            reason = "the steps beat the peak, which was measured on a busy machine; the next run measures it again"
            self.content["missing"].setdefault("train.mfu_percent", reason)
        self.update(callbacks=means | utilisation.means())

    def measure_memory(self) -> None:
        """Note the peaks so far. Collective."""
        gpu = pinned = None
        if torch.cuda.is_available():
            gpu = {"allocated_mib": mib(torch.cuda.max_memory_allocated())}
            gpu["reserved_mib"] = mib(torch.cuda.max_memory_reserved())
            blocks = torch.cuda.host_memory_stats()
            if "allocated_bytes.peak" in blocks:
                pinned = {f"{kind}_mib": mib(blocks[f"{kind}_bytes.peak"]) for kind in ("active", "allocated")}
        ranks = gather_lists([gpu, pinned])
        self.measure_process_memory()
        if gpu:
            self.update(peak_gpu_memory=[of_gpu for of_gpu, _ in ranks])
        else:
            self.missing("peak_gpu_memory", "no GPU")
        if pinned:
            self.update(peak_pinned_memory=[of_blocks for _, of_blocks in ranks])
        else:
            self.missing("peak_pinned_memory", "this PyTorch does not count it" if gpu else "no GPU")

    def note_held(self, own: dict[str, int | None] | None) -> None:
        """own: bytes of this rank's parameters, gradients and optimizer state. Collective."""
        of_ranks = [of_rank for (of_rank,) in gather_lists([own])]
        if None in of_ranks:
            self.missing("held", "the training had no second step")
            return
        self.update(held=of_ranks)
        if of_ranks[0]["gradients"] is None:
            self.content["missing"]["held.gradients"] = "DeepSpeed drops them in the step, without accumulation"

    def measure_process_memory(self) -> None:
        """Note the peak of each process so far. Collective."""
        peaks = [peak for (peak,) in gather_lists([peak_process_mib()])]
        if None in peaks:
            self.missing("peak_process_mib", "this system does not count it")
        else:
            self.update(peak_process_mib=peaks)

    def refuse_to_overwrite(self, output_dir: str) -> None:
        """Raises WorkshopError (exit code 2) when this run would overwrite the result of one that is finished."""
        if rank() != 0:
            return
        way_out = "give another --output_dir, a new JOB_ID, or --resume_from_checkpoint"
        if (Path(output_dir) / "config.json").exists():
            raise WorkshopError(output_dir, "holds the model of a finished run", way_out)
        if self.path.exists() and read_record(self.path).status == "completed":
            way_out = "set a new JOB_ID, or move the file away"
            raise WorkshopError(self.path, "is the record of a finished run", way_out)

    def __enter__(self) -> "RunRecord":
        self.held.enter_context(sole_writer(self.content["job_id"]))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        with self.held:
            if self.path.exists():
                self.close(error)

    def close(self, error: BaseException | None) -> None:
        """Note how the run ended: by this exception, or well."""
        code = exit_code(error)
        out_of_memory = is_out_of_memory(error)
        on_disk = read_record(self.path)
        running = not on_disk.finished
        # a job that was told to stop may have been given up by its launcher, while this rank still saved
        if rank() == 0 and (running or on_disk.status == "stopped"):
            self.update(status="oom" if out_of_memory else outcome(code), exit_code=code, finished=now())
        elif out_of_memory or (running and isinstance(error, Exception)):
            # rank 0 is about to be ended by the launcher and would only know that it was stopped
            close_record(self.path, "oom" if out_of_memory else "failed", code)

    def close_as_hung(self, error: WorkshopError) -> None:
        """Close the record for the watchdog, whose thread calls this. error: names the ranks that hang."""
        change_record(self.path, status="failed", exit_code=error.code, finished=now(), reason=error.what)


def how_it_ended(record: Record) -> str:
    """How the attempt of this record ended, in words."""
    if record.reason:
        return record.reason
    if record.exit_code is None:
        return WITHOUT_A_WORD
    by = f" by {record.stop.signal}" if record.stop else ""
    return f"{record.status}{by} (exit code {record.exit_code})"


def peak_process_mib() -> float | None:
    """Largest resident memory of this process so far, None where the kernel does not tell.

    getrusage's ru_maxrss also holds that of the program which started this one: an exec leaves it as it was.
    """
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    return round(int(found[1]) / 1024, 1) if found else None


def mib(size: int) -> float:
    return round(size / 2**20, 1)


def experiment_path() -> str:
    """The working directory as seen from the repository, or its name alone when it lies elsewhere."""
    if "EXPERIMENT" in os.environ:  # job.sh: it may run a snapshot of the repository
        return os.environ["EXPERIMENT"]
    here = Path.cwd()
    return str(here.relative_to(REPOSITORY)) if here.is_relative_to(REPOSITORY) else here.name


def from_repository(value: object) -> object:
    """A path below the repository as seen from there; all else as it is. A record tells nothing of the machine."""
    if isinstance(value, str) and Path(value).is_absolute() and Path(value).is_relative_to(REPOSITORY):
        return str(Path(value).relative_to(REPOSITORY))
    return value


def hardware(world_size: int) -> dict:
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return {
        "gpu": gpu.name if gpu else None,
        "gpus": world_size if gpu else 0,
        "gpu_memory_mib": gpu.total_memory // 2**20 if gpu else None,
        "cpu": names[0].split(":")[1].strip() if names else platform.machine(),
        "cpus": os.cpu_count(),
    }


def versions() -> dict[str, str]:
    """Of this workshop, Python and the packages."""
    own = {"workshop": workshop_version(), "python": platform.python_version()}
    return own | {name: version(name) for name in PACKAGES}


def bandwidth() -> dict | None:
    """What measure_bandwidth.py measured in this job before the training."""
    path = Path(os.environ.get("BANDWIDTH_FILE", ""))
    return json.loads(path.read_text()) if path.is_file() else None
