"""The view of one job: Slurm's state, the progress, the losses, and the last sample of each memory logger.

Nothing here starts a step in the job (srun --overlap): a restarted job could get that step's number, and Slurm would
end it.
"""

import os
import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from job.end_of_job import ask_queue, ask_slurm, is_alive
from job.memory_logs import last_samples, log_host, memory_log_paths
from reporting.runs import last_written, record_path, run_folders
from reporting.trainer_log import last_error, last_values, log_end, progress, read_problem, read_summary
from shared.errors import WorkshopError, one_line
from shared.paths import EXPERIMENTS, REPOSITORY

LATE = 20  # seconds; the loggers write a sample every 5 seconds by default
# Lines that do not help: rules, the Trainer's values, Slurm's messages except errors, and psrecord's first line
NOISE = re.compile(r"=+$|\{|(srun|slurmstepd): (?!error: )|Attaching to process ")


def newest_job() -> str:
    """Return the newest of your jobs of these experiments in the queue, otherwise the job of the newest log."""
    queue = ask_slurm("squeue", "--me", "--noheader", "--format=%i %Z")
    jobs = [int(job) for job in re.findall(rf"^(\d+)\S* {re.escape(str(EXPERIMENTS))}/", queue, re.MULTILINE)]
    log = None if jobs else newest_log("*")
    return str(max(jobs)) if jobs else log.stem.rpartition("_")[2] if log else ""


def newest_log(job: str) -> Path | None:
    """Return the newest log below experiments/ of a job. job: its id, or a pattern."""
    logs = [log for folder in run_folders([EXPERIMENTS]) for log in folder.glob(f"log/*_{job}.out")]
    return max(logs, key=last_written, default=None)


def state_in_queue(queue: dict[str, str]) -> str:
    if queue["state"] == "PENDING":
        expected = "" if queue["start"] == "N/A" else f", expected start {queue['start']}"
        return f"PENDING ({queue['reason']}){expected}"
    return "{state} for {used} on {nodes}, time left {left}".format_map(queue)


def view_job(job: str, log: Path | None) -> tuple[list[str], bool]:
    """Return the lines of the view, and True if the job may still change.

    Raises WorkshopError (exit code 2) if neither Slurm nor a log knows the job.
    """
    answer = ask_queue(f"--jobs={job}") if job.isdigit() else {}
    queue = None if answer is None else answer.get(job, {})
    if not log and queue == {}:
        problem = "no job in Slurm's queue and no log in experiments/ has this id"
        raise WorkshopError(job or "watch.sh", problem, "squeue --me lists your jobs")
    folder = log.parent.parent if log else Path((queue or {}).get("folder", ""))
    text = log_end(log)
    status, code = read_summary(text)
    summary = f"status: {status} (exit code {code})" if status else ""
    state = state_in_queue(queue) if queue else ""
    if queue is None and not summary:
        state = "unknown: Slurm does not answer"
    elif not job.isdigit() and os.path.isdir(folder / "results" / f".{job}"):
        # A run without Slurm locks its folder. Before its log's first line, our own lock could be in the way
        state = "running" if not text or is_alive(record_path(folder, job)) else state
    runs = not summary and state.startswith(("running", "RUNNING", "unknown"))
    lines = [f"job {job}" + (f" in {os.path.relpath(folder, REPOSITORY)}" if folder.name else "")]
    problem = f"its log cannot be read: {read_problem(log)}" if read_problem(log) else ""
    lines.append(state or f"ended, {summary or problem or 'without a summary: see the end of its log'}")
    if not log:
        return [*lines, "log        none yet"], True
    lines.append(f"log        log/{log.name}, last line {age(log):.0f} s ago")
    if steps := progress(text, runs):
        lines.append(f"step       {steps}")
    elif not summary:
        helpful = [line for line in text.splitlines() if line.strip() and not NOISE.match(line)]
        lines.append(f"last line  {(helpful or [problem])[-1]}")
    for label, name, count in (("loss", "loss", 1), ("eval loss", "eval_loss", 5)):
        if values := last_values(text, name, count):
            lines.append(f"{label:10} {' '.join(values)}")
    lines += filter(None, [last_error(text)])
    if summary:
        lines += ["", *text[text.rindex(summary) :].partition("\n====")[0].splitlines()]
    elif runs:
        lines += node_rows(folder, job, text, queue or {})
    return list(map(one_line, lines)), bool(state)


def age(path: Path) -> float:
    """Return the seconds since the last write to a file."""
    return time.time() - last_written(path).timestamp()


def node_rows(folder: Path, job: str, text: str, queue: dict[str, str]) -> Iterator[str]:
    """Yield the nodes that do not answer Slurm, or that are down, draining or failing, and the samples of the others.

    A node that does not answer has no samples: they would look as if the node still answered.
    """
    yield from ("", f"{'node':20} {'':8} {'memory (MiB)':24} load")
    silent = set()
    nodes = queue.get("nodes")
    answer = ask_slurm("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T") if nodes else ""
    for line in sorted(set(answer.splitlines())):
        name, _, state = line.partition(" ")
        if state.endswith("*"):
            silent.add(name)
            yield f"{name:20} does not answer ({state})"
        elif state.startswith(("down", "drain", "fail")):
            yield f"{name:20} is {state} in Slurm"
    start = queue.get("start", "")
    began = datetime.fromisoformat(start).timestamp() if start[:1].isdigit() else 0  # of this attempt
    hosts = "".join(re.findall(r"^nodes: (.*)", text, re.MULTILINE)[-1:]).split()
    gpu_logs, cpu_logs = memory_log_paths(folder, job)
    for host in (host for host in hosts if host not in silent):
        for log in (log for log in cpu_logs + gpu_logs if (log_host(log) or host) == host):
            if last_written(log).timestamp() >= began:
                yield from sample_rows(host, log)


def sample_rows(host: str, log: Path) -> Iterator[str]:
    """Yield a row for each series of a memory log."""
    late = f"no sample for {age(log):.0f} s" if age(log) > LATE else ""
    try:
        samples = last_samples(log)
    except OSError as error:
        yield f"{host:20} {log.name}: {error.strerror}"
        return
    for sample in samples:
        kind, unit = ("CPU", "% of one core") if sample.series == "process" else (f"GPU {sample.series}", "%")
        used = " of ".join(f"{mib:.0f}" for mib in (sample.mib, sample.total) if mib is not None) or "unknown"
        known = [(value, unit) for value, unit in ((sample.load, unit), (sample.watts, "W")) if value is not None]
        load = late or ", ".join(f"{value:.0f} {unit}" for value, unit in known)
        yield f"{host:20} {kind:8} {used:24} {load}"
