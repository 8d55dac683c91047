"""The run record ``results/<job_id>.json``: everything that is later said about a run comes from here.

Schema 1. Written by rank 0, replaced atomically. A value that could not be measured is null, and `missing`
gives the reason under the same name; a number that is not finite is null as well.

    schema              1
    status              running | completed | failed | oom | timeout | stopped
    exit_code           of the training, null while it runs
    job_id, experiment, run_name, command, started, finished (UTC), resumed_from, output_dir
    attempt             1, or more when this job id was started again
    restarts            one entry for each attempt but the first: time, reason (how the one before ended), step that it
                        goes on from, and started and finished of the one before; all else is of the last attempt
    overrides           directives of the .slurm file that were given otherwise at submission
    stop                null, or of a run that was stopped: signal, step, checkpoint
    nodes               host names, in rank order
    pid                 of rank 0, on the first node
    world_size          number of ranks
    hardware            gpu (name), gpus (on all nodes), gpu_memory_mib, cpu, cpus (of one node)
    git                 commit, dirty (whether files differed from it)
    bandwidth           of the job's bandwidth test, null without one: bus_bandwidth_gb_per_s, ranks, message_bytes,
                        iterations (all-reduces measured), backend, algorithm, transport
    versions            python and packages
    knobs               name -> requested, effective
    settings            value of every knob, and of each other flag that was given; paths below the repository are
                        relative to it, as in command
    configs             model: of its config.json, what is not transformers' default; deepspeed, fsdp: in effect, every
                        "auto" filled in, null without it
    parameters          number of them, tied ones once
    steps_per_epoch     optimizer steps
    train_size, eval_size
    questions_cut       train, eval: how many of them have lost the end of their context to --max_length
    eval                list, one entry per evaluation: epoch, step, loss, runtime_s, samples_per_second
    train               steps, loss_mean (the Trainer's), loss_last (last logged), runtime_s, samples_per_second,
                        steps_per_second (the Trainer's: they include evaluation and saving),
                        steady_samples_per_second, steady_steps_per_second, steady_steps (steps alone, warm-up left
                        out), warm_up_seconds (from the begin of this attempt's training to that of its fourth
                        step; torch.compile compiles then);
                        real_tokens, padding_tokens, counted_tokens (labels that count in the loss),
                        steady_tokens_per_second (real tokens of all ranks, in these steps), mfu_percent (of them),
                        matmul_peak_tflops (that MFU is a share of: of one rank, in 10^12 operations per second; the
                        GPU's published one, else measured while all ranks compute);
                        of all attempts together, each up to the checkpoint that was gone on from
    exact_match, f1     percent over eval_size questions
    callbacks           train/steps_per_second_mean, train/samples_per_second_mean (the steady rates), and means over
                        steps and ranks: avg_gpu_util_%, std_gpu_util_%, avg_mem_alloc_MB, avg_mem_reserved_MB,
                        avg_mem_total_MB; on the CPU avg_cpu_util_%, std_cpu_util_%, avg_process_mem_MB
    profile             of a run with --profile, per rank: steps, seconds_per_step, and of these data, forward,
                        backward, optimizer, communication (with nothing computed beside it), other;
                        hidden_communication; trace (its file)
    peak_gpu_memory     per rank: allocated_mib, reserved_mib, as PyTorch counted up to the end of training
    peak_pinned_memory  of page-locked CPU memory, per rank: active_mib (blocks in use), allocated_mib (with those kept
                        for later use), as PyTorch counted up to the end of training
    peak_process_mib    per rank: largest resident memory of the process, up to the end of the run
"""

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

from errors import ENVIRONMENT, WorkshopError, whole_number
from job.finish import finish, now, outcome, read_record
from job.git_state import git_state
from json_files import write_json
from parallel.distributed import exit_code, gather_lists, is_out_of_memory, rank, same_everywhere
from paths import REPOSITORY

SCHEMA = 1
PACKAGES = ["torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers"]


def new_job_id() -> str:
    """The job's id, equal on all ranks: JOB_ID, else Slurm's, else local-<time>-<pid>.

    Raises WorkshopError (exit code 2) for one that cannot be part of a file's name.
    """
    local = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    job_id = os.environ.get("JOB_ID") or os.environ.get("SLURM_JOB_ID") or local
    if not re.fullmatch(r"(?!\.)[A-Za-z0-9._-]{1,64}", job_id):
        raise WorkshopError("JOB_ID", f"{job_id!r:.80} cannot name files", "give up to 64 letters, digits, . _ or -")
    return same_everywhere(job_id)


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
    """A dict on every rank, a file of rank 0. As a context manager it notes how the run ended."""

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

    def start(self, step: int, **values: object) -> None:
        """Write the record for the first time. Collective: every rank adds its host name.

        step: that the run goes on from, 0 from the beginning.
        """
        hosts = [host for (host,) in gather_lists([socket.gethostname()])]
        if rank() == 0 and self.path.exists():
            before = read_record(self.path)
            self.content["attempt"] = max(self.content["attempt"], before.get("attempt", 1) + 1)
            restart = {"time": now(), "reason": how_it_ended(before), "step": step}
            restart |= {"started": before.get("started"), "finished": before.get("finished")}
            self.content["restarts"] = [*before.get("restarts", []), restart]
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
            "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
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
        on_disk = read_record(self.path) if self.path.exists() else {}
        newer = on_disk.get("attempt", 1) - self.content["attempt"]
        if newer > 0:
            return  # the job has begun again, while this process outlived it
        if newer == 0 and self.content["status"] == "running" and on_disk.get("status"):
            # job.sh notes a signal, or the end, while this process still saves; its own end will count
            ends = ("status", "exit_code", "finished")
            self.content |= {name: on_disk[name] for name in ends if name in on_disk}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.content)
        except OSError as error:
            raise WorkshopError(
                self.path, f"cannot be written ({error.strerror})", "free disk space or quota", ENVIRONMENT
            ) from error

    def training(self, trainer, metrics: dict, speed, utilisation) -> None:
        """Note what the Trainer reports at the end of a training, and what the callbacks measured. Collective."""
        self.measure_memory()
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

    def measure_process_memory(self) -> None:
        """Note the peak of each process so far. Collective."""
        peaks = [peak for (peak,) in gather_lists([peak_process_mib()])]
        if None in peaks:
            self.missing("peak_process_mib", "this system does not count it")
        else:
            self.update(peak_process_mib=peaks)

    def __enter__(self) -> "RunRecord":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if not self.path.exists():
            return
        code = exit_code(error)
        out_of_memory = is_out_of_memory(error)
        on_disk = read_record(self.path)
        running = not on_disk.get("finished")
        # a job that was told to stop may have been given up by its launcher, while this rank still saved
        if rank() == 0 and (running or on_disk["status"] == "stopped"):
            self.update(status="oom" if out_of_memory else outcome(code), exit_code=code, finished=now())
        elif out_of_memory or (running and isinstance(error, Exception)):
            # rank 0 is about to be ended by the launcher and would only know that it was stopped
            finish(self.path, "oom" if out_of_memory else "failed", code)


def how_it_ended(record: dict) -> str:
    """How the attempt of this record ended, in words."""
    if not record.get("finished") and record.get("status") == "running":
        return "ended without a word: its node failed, or it was killed"
    stop = record.get("stop")
    by = f" by {stop['signal']}" if isinstance(stop, dict) and "signal" in stop else ""
    return f"{record.get('status')}{by} (exit code {record.get('exit_code')})"


def peak_process_mib() -> float | None:
    """Largest resident memory of this process so far, None where the kernel does not tell.

    getrusage's ru_maxrss also holds that of the program which started this one: an exec leaves it as it was.
    """
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    return round(int(found[1]) / 1024, 1) if found else None


def mib(size: int) -> float:
    return round(size / 2**20, 1)


def refuse_finished(record_path: Path, output_dir: str) -> None:
    """Raises WorkshopError (exit code 2) when this run would overwrite the result of one that is finished."""
    if rank() != 0:
        return
    way_out = "give another --output_dir, a new JOB_ID, or --resume_from_checkpoint"
    if (Path(output_dir) / "config.json").exists():
        raise WorkshopError(output_dir, "holds the model of a finished run", way_out)
    if record_path.exists() and read_record(record_path).get("status") == "completed":
        raise WorkshopError(record_path, "is the record of a finished run", "set a new JOB_ID, or move the file away")


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


def bandwidth() -> dict | None:
    """What measure_bandwidth.py measured in this job before the training."""
    path = Path(os.environ.get("BANDWIDTH_FILE", ""))
    return json.loads(path.read_text()) if path.is_file() else None
