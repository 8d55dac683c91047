"""End of a job: note how its attempt ended, and print a summary for its log. Also note the end of jobs that are gone.

The attempts are in results/jobs/<job_id>.json. The functions take the path of the training's results/<job_id>.json.
run_job.py calls them. They must finish in the seconds between SIGTERM and SIGKILL, so this module imports no large
package.

The end of an attempt follows from four notes: status and exit code in the training's record, exit code and name (or
error line) of the process that failed first, a signal to the job, and what Slurm says. A job that is `gone` noted no
end. A later job in its folder notes it, or the job itself when Slurm has started it `again`.

    training     first                 signal  slurm       ->  status     code  reason
    completed 0  -                     -       -           ->  completed  0     -
    completed 0  -                     yes     TimeLimit   ->  completed  0     -
    completed 0  143 rank 5            yes     -           ->  completed  0     -
    completed 0  1 rank 5              -       -           ->  failed     1     rank 5 ended first, with exit code 1
    stopped 75   -                     yes     -           ->  stopped    75    -
    stopped 75   75 rank 5             yes     -           ->  stopped    75    -
    stopped 75   -                     yes     TimeLimit   ->  timeout    75    -
    stopped 143  137                   yes     -           ->  failed     137   -
    failed 3     3 rank 5              -       -           ->  failed     3     rank 5 ended first, with exit code 3
    failed 3 X   3 rank 5              -       -           ->  failed     3     X
    oom 1        1 rank 5              -       -           ->  oom        1     rank 5 ended first, with exit code 1
    oom 1        143                   -       -           ->  oom        143   -
    running      -                     -       -           ->  failed     137   -
    running      -                     yes     -           ->  stopped    143   -
    running      143 rank 5            yes     TimeLimit   ->  timeout    143   -
    running      143 rank 5            -       -           ->  stopped    143   -
    running      137 rank 5            -       -           ->  failed     137   rank 5 ended first, ... (killed, ...)
    running      137 launcher 0        -       -           ->  failed     137   launcher 0 ended ... (ended by SIGKILL)
    running      139 rank 5            -       -           ->  failed     139   rank 5 ended ... (ended by SIGSEGV)
    running      3 error: file: X; Y   -       -           ->  failed     3     file: X; Y
    running      137 the only process  -       -           ->  failed     137   exit code 137 (killed, ...)
    running      2 the only process    -       -           ->  failed     2     -
    running      1 rank 5              -       node3 down  ->  failed     1     node failure on node3
    -            -                     -       -           ->  completed  0     -
    -            2 rank 5              -       -           ->  failed     2     rank 5 ended first, with exit code 2
    running      gone                  -       NODE_FAIL   ->  failed     -     ... state of the job is NODE_FAIL
    running      gone                  -       -           ->  failed     -     ... its node failed, or it was killed
    running      gone                  yes     CANCELLED   ->  stopped    143   ... state of the job is CANCELLED
    failed 1     gone                  -       NODE_FAIL   ->  failed     1     ... state of the job is NODE_FAIL
    running      again                 -       node3 down  ->  failed     -     node failure on node3
    running      again                 -       -           ->  failed     -     -
    running      again                 yes     -           ->  stopped    143   -
    failed 3 X   again                 -       -           ->  failed     3     X
    failed 3 X   again                 -       node3 down  ->  failed     3     node failure on node3
    stopped 75   again                 yes     -           ->  stopped    75    -
    completed 0  again                 -       node3 down  ->  completed  0     node failure on node3
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from job.memory_logs import MemoryLog, log_host, memory_log_paths, read_cpu_log, read_gpu_log
from job.on_node import output as ask_slurm
from records.schema import (
    LOCK,
    WITHOUT_A_WORD,
    Attempt,
    Record,
    job_path,
    now,
    outcome,
    read_attempts,
    read_record,
    read_training,
    write_attempts,
)
from shared.errors import STOPPING_SIGNALS, WorkshopError, cannot_be_written

# What Slurm's queue has about a job. reason: why it waits. folder: that of its submission
QUEUE = ("state", "reason", "nodes", "used", "left", "start", "folder")


def notes(path: Path) -> list[str]:
    """Return the lines that the parts of the job have noted in a file.

    The list is empty if the file cannot be read, because a lost note must not make the job fail.
    """
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def first_failed_process(run_dir: Path) -> tuple[int, str] | None:
    """Return exit code and name, such as "rank 1 on node2", of the process that failed first. None without a note.

    on_node.py and launch.py note the time in ns, the exit code and the name of each process that fails. A process that
    prints an error line notes this line in place of its name, at once: its launcher may notice its end much later.

    The clocks of the nodes are accurate enough for this order: a rank that fails only because another rank ended waits
    two seconds first (distributed/process_group.py). A line without a time sorts last. An incomplete line is skipped.
    """
    ends = filter(None, (re.fullmatch(r"(\d*) (\d{1,3}) (.+)", line) for line in notes(run_dir / "exit_codes")))
    first = min(ends, key=lambda end: (not end[1], int(end[1] or 0)), default=None)
    return (int(first[2]), first[3]) if first else None


def failure_reason(status: str, code: int, process: str, single: bool, noted: str | None) -> str | None:
    """Return the reason for a job's failure in one sentence, or None if the exit code is enough.

    code, process: exit code and name (or error line) of the process that failed first. The name is empty if no process
    noted its end.
    single: the job had one process. noted: the reason that the training itself has noted.
    """
    if status in ("completed", "timeout"):
        return None
    if failure := node_failure(os.environ.get("SLURM_JOB_NODELIST", "")):
        return failure
    if noted or status == "stopped" or not process:
        return noted
    if process.startswith("error: "):
        return process.removeprefix("error: ")
    cause = ""
    if code == 128 + signal.SIGKILL and not process.startswith("launcher"):  # a launcher needs little memory
        cause = " (killed, most often by the kernel for want of memory: see --mem)"
    elif code - 128 in list(signal.Signals):
        cause = f" (ended by {signal.Signals(code - 128).name})"
    if not single:
        return f"{process} ended first, with exit code {code}{cause}"
    return f"exit code {code}{cause}" if cause else None


def node_failure(nodes: str) -> str:
    """Return which of these nodes are down in Slurm. nodes: node[1-2] or node1,node2, empty without Slurm."""
    command = ("sinfo", "--noheader", f"--nodes={nodes}", "--states=down,fail", "--format=%N")
    failed = ask_slurm(*command).split() if nodes else []
    return f"node failure on {', '.join(failed)}" if failed else ""


def job_outcome(record: Record | None, exit_code: int, signal_noted: bool, timeout: bool) -> tuple[str, int]:
    """Return status and exit code of an attempt. The training's own end decides if its launcher returned 0.

    exit_code: exit code of the rank that failed first, or of the launcher. After a signal, it does not count if the
    training has completed: the signal has ended processes that had nothing left to do.
    """
    if record and record.status == "completed" and (exit_code == 0 or signal_noted):
        return "completed", 0
    if record and exit_code == 0:
        # srun stops waiting for a stopped step whose ranks save slowly, and returns 0
        exit_code = record.exit_code or 128 + (signal.SIGTERM if signal_noted else signal.SIGKILL)
    status = "timeout" if timeout else outcome(exit_code)
    return "oom" if record and record.status == "oom" else status, exit_code


def sweep(folder: Path, own: str = "") -> None:
    """Note the end of jobs that could not note it, such as after a node crash, and remove their folders.

    own: the id of the job that calls this.
    """
    for path in sorted({*folder.glob("*.json")} - {folder / f"{own}.json"}):
        with contextlib.suppress(WorkshopError, OSError):  # the report names the problem
            record = read_record(path)
            if ended_without_a_word(path, record):
                *earlier, last = read_attempts(path) or [Attempt(attempt=record.attempt)]
                closed = close_attempt(path, last, reason_from_slurm(path.stem))
                write_attempts(path, [*earlier, closed])
                print(f"{path}: the job is gone, and its status is now {closed.status}")
    for left in folder.glob(".*"):
        # The watchdog uses this folder in a run without a job. This run may still be active
        heartbeats = left.name.startswith(".ranks_")
        if (
            left.is_dir()
            and not heartbeats
            and left.name != f".{own}"
            and not is_alive(folder / f"{left.name[1:]}.json")
        ):
            shutil.rmtree(left, ignore_errors=True)


def close_attempt(path: Path, attempt: Attempt, slurm: str) -> Attempt:
    """Return an attempt with the end that its job could not note. slurm: what Slurm says about it, "" if nothing.

    The training may have ended before the job's first node failed, or a rank on another node has closed its record. A
    record without an end gives the time of its last change.
    """
    record = read_training(path) if path.exists() else None
    own = record if record and record.attempt == attempt.attempt else None
    end: dict[str, Any] = {"reason": slurm or attempt.reason or (own.reason if own else None)}
    if own and own.finished and not attempt.finished:
        end |= {"status": own.status, "exit_code": own.exit_code, "finished": own.finished}
    elif not attempt.finished:
        changed = datetime.fromtimestamp(int((path if own else job_path(path)).stat().st_mtime), UTC)
        end |= {"status": "stopped" if attempt.status == "stopped" else "failed", "finished": changed}
    return attempt.model_copy(update=end)


def begin_attempt(path: Path, restarts: int, **facts: Any) -> Attempt:
    """Note the start of an attempt. Complete the previous attempt if it noted no end, or failed. Raises OSError.

    A rank may have lost its connection, and so ended its job, before Slurm knew that the other node had failed.
    """
    attempts = read_attempts(path)
    record = read_training(path) if path.exists() else None
    if attempts and (not attempts[-1].finished or attempts[-1].status == "failed"):
        attempts[-1] = close_attempt(path, attempts[-1], node_failure(",".join(attempts[-1].nodes)))
    number = max([restarts, *(each.attempt for each in attempts), record.attempt if record else 0]) + 1
    attempt = Attempt(attempt=number, started=now(), **facts)
    write_attempts(path, [*attempts, attempt])
    return attempt


def note_attempt(path: Path, attempt: Attempt) -> bool:
    """Replace the newest attempt of a job. Return False, and write nothing, if the job has started again since.

    A process of an earlier attempt may continue on a node that did not answer for a while. Raises OSError.
    """
    *earlier, newest = read_attempts(path) or [attempt]
    if newest.attempt != attempt.attempt:
        return False
    write_attempts(path, [*earlier, attempt])
    return True


def ended_without_a_word(path: Path, record: Record) -> bool:
    """Return True if a job ended before run_job.py could note why, for example because its first node crashed.

    A rank on another node may have closed the record, but only run_job.py removes the job's folder.
    """
    if record.finished:
        unexplained = record.status == "failed" and not record.reason
        return unexplained and path.with_name(f".{path.stem}").is_dir() and not is_alive(path)
    return record.status in ("running", "stopped") and not is_alive(path)


def reason_from_slurm(job_id: str) -> str:
    """Return the reason why a job ended, if the job noted none: its state in Slurm, such as NODE_FAIL, if known."""
    if job_id.isdigit():
        # slurmctld forgets a job after MinJobAge (five minutes by default). sacct needs Slurm's database
        accounts = ("sacct", f"--jobs={job_id}", "--allocations", "--noheader", "--parsable2", "--format=State")
        for command in (("scontrol", "show", "job", job_id), accounts):
            if state := re.search(r"(?:JobState=|\A)([A-Z_]{2,})", ask_slurm(*command)):
                return f"ended without a word: Slurm's state of the job is {state[1]}"
    return WITHOUT_A_WORD


def is_alive(record: Path) -> bool:
    """Return True if a record's job runs or may run: it holds a lock, or it is in Slurm's queue."""
    folder = record.parent / f".{record.stem}"
    for lock in (folder, folder / LOCK):  # locks of run_job.py and train.py
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:  # another process holds the lock, or the file system has no locks
                return True
            finally:
                os.close(descriptor)
    if not record.stem.isdigit():
        return False  # not a Slurm job
    queued = queued_jobs()
    return queued is None or record.stem in queued


def ask_queue(jobs: str) -> dict[str, dict[str, str]] | None:
    """Return jobs in Slurm's queue by id, each with the values of QUEUE. None if Slurm does not answer.

    jobs: a flag of squeue that chooses them.
    """
    command = ["squeue", jobs, "--noheader", "--format=%A|%T|%r|%N|%M|%L|%S|%Z"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return {}
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return {} if "Invalid job id" in done.stderr else None
    rows = [line.strip().split("|", len(QUEUE)) for line in done.stdout.splitlines()]
    return {job_id: dict(zip(QUEUE, values, strict=True)) for job_id, *values in rows if len(values) == len(QUEUE)}


@cache
def queued_jobs() -> dict[str, dict[str, str]] | None:
    """Return all jobs in Slurm's queue, as `ask_queue` does."""
    return ask_queue("--all")


def summary(job_id: str, record: Record | None, exit_code: int, noted: list[str], earlier: bool) -> list[str]:
    """Return lines for the end of the log: memory and power per GPU, throughput, and missing measurements.

    earlier: the job's record is from an earlier attempt.
    """
    rows: list[str] = []
    missing = list(noted)
    if record and record.hardware.gpus == 0:  # the job had no GPU
        missing = [line for line in missing if not re.search("gpu_memory/|GPU memory", line)]
        if len(missing) < len(noted):
            rows.append("no GPU: the rows of its memory are left out")
    gpu_logs, cpu_logs = memory_log_paths(Path(), job_id)
    limit = record.hardware.gpu_power_limit_w if record else None
    for log in map(read_gpu_log, gpu_logs):
        rows += memory_rows(log, missing) + power_rows(log, limit, missing)
    for log in map(read_cpu_log, cpu_logs):
        rows += memory_rows(log, missing)
    train = record.train if record else None
    if record and train and train.samples_per_second is None:
        missing.append(f"samples per second: {record.missing.get('train.samples_per_second')}")
    elif train:
        steady = train.steady_samples_per_second
        rows.append(
            f"samples per second: {train.samples_per_second:.2f} (Trainer)"
            + (f", {steady:.2f} (steps alone)" if steady else "")
        )
    elif earlier:
        missing.append(
            "no run record of this attempt: it ended before its training began; "
            f"results/{job_id}.json is from an earlier attempt"
        )
    elif record is None:
        why = "the job ended before the training began" if exit_code else "the job is not a training"
        missing.append(f"no run record: {why}")
    else:
        missing.append("samples per second: the training did not finish")
    if record and record.settings.torch_compile:
        missing.append("memory without torch.compile: the peaks include what compiling needed")
    if exit_code - 128 in STOPPING_SIGNALS:
        name = signal.Signals(exit_code - 128).name
        missing.append(
            f"a checkpoint of its end: {name} came before the first step or after the last, or interrupted the save"
        )
    return [*rows, *(f"missing: {what}" for what in missing)]


def memory_rows(log: MemoryLog, missing: list[str]) -> list[str]:
    missing += log.problems
    if not log.samples:
        missing.append(f"{log.path}: no sample")
    missing += [
        f"GPU {name} memory{on_host(log)}: nvidia-smi reported none" for name in log.names() if not log.mib(name)
    ]
    return [
        f"{'CPU' if name == 'process' else f'GPU {name}'} memory{on_host(log)}: peak {log.peak(name):.0f} MiB, "
        f"mean {log.mean(name):.0f} MiB ({len(log.mib(name))} samples)"
        for name in log.names()
        if log.mib(name)
    ]


def power_rows(log: MemoryLog, limit: float | None, missing: list[str]) -> list[str]:
    """Return a line for the mean power of each GPU. limit: the power limit of one GPU in W, None if unknown."""
    rows = []
    for name in log.names():
        watts = log.mean_power(name)
        if watts is None:
            missing.append(f"GPU {name} power{on_host(log)}: nvidia-smi reported none")
            continue
        share = f" ({100 * watts / limit:.0f} % of its limit of {limit:.0f} W)" if limit else ""
        rows.append(f"GPU {name} power{on_host(log)}: mean {watts:.0f} W{share}")
    return rows


def on_host(log: MemoryLog) -> str:
    return f" on {log_host(log.path)}" if log_host(log.path) else ""


class End(NamedTuple):
    """End of an attempt: the job's exit code, and the training's record if this attempt has one.

    newest: False if the job has started again since, and this process is left over from an earlier attempt.
    """

    code: int
    record: Record | None
    newest: bool = True


def end_attempt(path: Path, run_dir: Path, attempt: Attempt, exit_code: int, timeout: bool, ranks: int) -> End:
    """Note how an attempt has ended, and print the summary.

    path: the run record. run_dir: the folder in which the parts of this attempt noted failures and gaps in logs.
    """
    record, earlier = None, False
    try:
        record = read_training(path) if path.exists() else None
    except WorkshopError as error:
        print(f"error: {error}", file=sys.stderr)
    if record and record.attempt != attempt.attempt:
        earlier = record.status != "completed"  # otherwise this attempt is a second command, after the training
        record = None
    failed = None if record and record.status == "completed" and exit_code == 0 else first_failed_process(run_dir)
    code, process = failed or (exit_code, "")
    status, code = job_outcome(record, code, attempt.status == "stopped", timeout)
    ranks = record.world_size or 1 if record else ranks
    reason = failure_reason(status, code, process, ranks == 1, record.reason if record else None)
    end = {"status": status, "exit_code": code, "reason": reason, "finished": now()}
    try:
        if not note_attempt(path, attempt.model_copy(update=end)):
            return End(code, record, newest=False)
    except (WorkshopError, OSError) as error:  # for example on a full disk; the summary is still printed
        problem = cannot_be_written(job_path(path), error) if isinstance(error, OSError) else error
        print(f"error: {problem}", file=sys.stderr)
    noted = [line for path in sorted(run_dir.glob("missing_*")) for line in notes(path)]
    lines = [f"status: {status} (exit code {code})", *filter(None, [reason])]
    if container := os.environ.get("CONTAINER"):
        lines.append(f"container: {container}")
    lines += summary(path.stem, record, code, noted, earlier)
    print("\n".join(["", "=" * 60, *lines, "=" * 60]))
    return End(code, record)
