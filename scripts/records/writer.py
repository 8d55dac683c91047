"""Writer of the training's part of the run record, ``results/<job_id>.json``. schema.py describes its fields."""

import contextlib
import fcntl
import math
import os
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from distributed.collectives import broadcast_from_rank_0, gather_lists, rank
from distributed.process_group import exit_code, is_out_of_memory
from records.git_state import git_state
from records.run_environment import bandwidth, experiment_path, hardware, strip_repository, versions
from records.schema import (
    LOCK,
    SCHEMA,
    WITHOUT_A_WORD,
    Pause,
    Record,
    local_now,
    now,
    outcome,
    read_record,
    read_training,
)
from shared.errors import WorkshopError, cannot_be_written, one_line, whole_number
from shared.files import replace_file
from shared.json_files import write_json
from shared.paths import saved_model


@contextlib.contextmanager
def sole_writer(folder: Path, job_id: str, knob: str) -> Iterator[None]:
    """Create and lock a folder, so that no other run writes into it. Remove it afterwards if it is empty.

    The system releases the lock when the process ends, for whatever reason. knob: the flag or variable that gives
    another folder. Raise WorkshopError (exit code 2) that names the job that holds the lock.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A process of an earlier attempt, on a node that does not answer, keeps its lock. So lock a new file
        if whole_number("SLURM_RESTART_COUNT", "0") and path.exists() and path.read_text() == job_id:
            path.unlink(missing_ok=True)
        lock = path.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what = f"job {path.read_text()} is running and has locked {path}"
            remedy = f"give another {knob}, or wait until that job ends (if its node has failed, delete this file)"
            raise WorkshopError(knob, what, remedy) from error
        except OSError:
            print(f"{folder}: this file system has no locks, so start no second run that writes here", flush=True)
        path.write_text(job_id)
    except OSError as error:
        raise cannot_be_written(path, error) from error
    try:
        yield
    finally:
        with lock, contextlib.suppress(OSError):
            # A later attempt may have replaced the file
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()  # fails if the folder is not empty


class RunRecord:
    """The run record: a dict on every rank, which rank 0 writes into a file.

    As a context manager, it rejects a second run with the same job id or the same output folder, and records how this
    run ended.
    """

    def __init__(self, job_id: str, output_dir: str):
        self.path = Path("results") / f"{job_id}.json"
        self.output_dir = Path(output_dir)
        self.reasons: dict[str, str] = {}  # name of a field -> reason why it has no value
        self.content: dict = {
            "schema": SCHEMA,
            "status": "running",
            "exit_code": None,
            "job_id": job_id,
            "attempt": whole_number("ATTEMPT", "1"),  # the job also counts attempts that ended before they had a record
            "restarts": [],
            "pauses": [],
            "missing": self.reasons,
        }
        self.earlier_kwh = 0.0  # energy of earlier attempts, NaN if unknown
        self.locks = contextlib.ExitStack()

    def start(self, step: int, **values: object) -> None:
        """Write the record for the first time. Collective: every rank adds its host name.

        step: step that the run resumes from, 0 for a new run.
        """
        hosts = [host for (host,) in gather_lists([socket.gethostname()])]
        if rank() == 0 and self.path.exists():
            before = read_record(self.path)
            if "ATTEMPT" not in os.environ:
                self.content["attempt"] = before.attempt + 1
            restart = {
                "time": now(),
                "reason": describe_end(before),
                "step": step,
                "started": before.started,
                "finished": before.finished,
            }
            self.content["restarts"] = [*before.restarts, restart]
            kwh = before.energy.kwh if before.energy else None
            self.earlier_kwh = math.nan if kwh is None else kwh
            self.content["pauses"] = before.pauses
        self.content["attempt"] = broadcast_from_rank_0(self.content["attempt"])
        self.content |= {
            "experiment": experiment_path(),
            "command": [strip_repository(word) for word in sys.argv],
            "started": now(),
            "finished": None,
            "stop": None,
            "nodes": list(dict.fromkeys(hosts)),
            "pid": os.getpid(),
            "world_size": len(hosts),
            "hardware": hardware(len(hosts)),
            "git": git_state() if rank() == 0 else None,
            "bandwidth": bandwidth(),
            "container": os.environ.get("CONTAINER") or None,
            "versions": versions(),
            **values,
        }
        settings = self.content.get("settings", {})
        self.content["settings"] = {flag: strip_repository(value) for flag, value in settings.items()}
        self.write()

    def update(self, **values: object) -> None:
        self.content |= values
        self.write()

    def add_pause(self, what: str, started: datetime) -> None:
        """Record an evaluation or a save that ends now. started: a result of `local_now`."""
        pause = Pause.model_validate({"what": what, "started": started, "finished": local_now()})
        self.update(pauses=[*self.content["pauses"], pause])

    @contextlib.contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Record that the body evaluates or saves."""
        started = local_now()
        yield
        self.add_pause(what, started)

    def missing(self, name: str, reason: str) -> None:
        """Set the field `name` to null and note the reason."""
        self.reasons[name] = reason
        self.update(**{name: None})

    def write(self) -> None:
        if rank() != 0:
            return
        on_disk = read_training(self.path) if self.path.exists() else None
        if on_disk and on_disk.attempt == self.content["attempt"] and self.content["status"] == "running":
            # Another rank may have noted its error while this process still trains. Keep those fields
            self.content |= {name: getattr(on_disk, name) for name in ("status", "exit_code", "finished", "reason")}
        self.replace(Record.model_validate(self.content))

    def replace(self, record: Record) -> None:
        """Replace the file, but not if this process is left over from an earlier attempt of the job."""
        if self.path.exists() and read_training(self.path).attempt > record.attempt:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, record.model_dump(mode="json", by_alias=True, exclude_unset=True))
        except OSError as error:
            raise cannot_be_written(self.path, error) from error

    def list_left_out(self, rows: list[str]) -> None:
        """Write results/<job_id>_left_out.txt with one line for each row of the questions that the run does not use."""
        path = self.path.with_name(f"{self.path.stem}_left_out.txt")
        try:
            path.unlink(missing_ok=True)  # an earlier run with this job id may have written it
            if rows:
                replace_file(path, "".join(f"{one_line(row)}\n" for row in rows))
                print(f"rows left out: {len(rows)}, all listed in {path}", flush=True)
        except OSError as error:
            raise cannot_be_written(path, error) from error

    def refuse_to_overwrite(self) -> None:
        """Raise WorkshopError (exit code 2) if this run would overwrite the result of a finished run."""
        if rank() != 0:
            return
        remedy = "give another --output_dir, a new JOB_ID, or --resume_from_checkpoint"
        if saved_model(self.output_dir):
            raise WorkshopError(self.output_dir, "holds the model of a finished run", remedy)
        if self.path.exists() and read_record(self.path).status == "completed":
            remedy = "set a new JOB_ID, or move the file away"
            raise WorkshopError(self.path, "is the record of a finished run", remedy)

    def __enter__(self) -> "RunRecord":
        job_id = self.content["job_id"]
        if rank() == 0:
            with contextlib.ExitStack() as locks:
                locks.enter_context(sole_writer(self.path.with_name(f".{job_id}"), job_id, "JOB_ID"))
                locks.enter_context(sole_writer(self.output_dir, job_id, "--output_dir"))
                self.locks = locks.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        with self.locks:
            if self.path.exists():
                self.close(error)

    def close(self, error: BaseException | None) -> None:
        """Record how the run ended: with this exception, or completed if there is none."""
        code = exit_code(error)
        reason = error.what if isinstance(error, WorkshopError) else None
        out_of_memory = is_out_of_memory(error)
        running = not read_training(self.path).finished
        # After an exception on another rank, the launcher ends rank 0, which would record only that it was stopped
        if out_of_memory or (running and (rank() == 0 or isinstance(error, Exception))):
            self.write()
            status = "oom" if out_of_memory else outcome(code)
            self.change(status=status, exit_code=code, finished=now(), reason=reason)

    def close_as_hung(self, error: WorkshopError) -> None:
        """Close the record with an error that names the hanging ranks. The watchdog's thread calls this."""
        self.change(status="failed", exit_code=error.code, finished=now(), reason=error.what)

    def change(self, **fields: object) -> None:
        """Replace fields of the file, which another rank has written."""
        self.replace(read_training(self.path).model_copy(update=fields | {"attempt": self.content["attempt"]}))


def describe_end(record: Record) -> str:
    """Return a phrase that says how this record's attempt ended."""
    if record.reason:
        return record.reason
    if record.exit_code is None:
        return WITHOUT_A_WORD
    by = f" by {record.stop.signal}" if record.stop else ""
    return f"{record.status}{by} (exit code {record.exit_code})"
