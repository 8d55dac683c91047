"""A made-up class for tests: clones of participants with records and logs, and an answer of squeue."""

import copy
import json
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from helpers import REPOSITORY
from report_files import cpu_log, gpu_log, write
from shell import program

SAMPLE = json.loads((REPOSITORY / "tests/data/runs_of_1.0.0/experiments/demo/zero3/results/201.json").read_text())
NAMES = [
    *("alice", "bjarne", "chloe", "dmitri", "elif", "fatou", "giulia", "haruto", "ingrid", "jamal", "katya", "liang"),
    *("marta", "nikos", "oona", "priya", "quentin", "rosa", "sofia", "tomasz"),
]
START = datetime(2026, 11, 26, 9, 0, tzinfo=UTC)
ERRORS = [
    "error: BATCH_SIZE: 'eight' is not a whole number; give a number such as 4",
    "error: --fp16: needs a GPU; leave it out",
    "error: output: No space left on device; free disk space or quota",
]
NO_MEMORY = "error: memory: CUDA out of memory; lower --per_device_train_batch_size or --max_length, or offload"
LINE = "=" * 60


@dataclass
class MadeUpClass:
    """folders: the clones. queue: the lines of squeue's answer."""

    folders: list[Path] = field(default_factory=list)
    queue: list[str] = field(default_factory=list)

    def install_squeue(self, folder: Path) -> Path:
        """Write a program squeue that answers only the report's own question. Returns its folder, for PATH."""
        answer = folder / "queue"
        rows = (line.rpartition("|") for line in self.queue)
        write(answer, "".join(f"{job}|||||{folder}\n" for job, _, folder in rows))
        lines = f'case "$*" in *"--format=%A|%T|%r|%N|%M|%L|%S|%Z") cat "{answer}" ;; *) exit 1 ;; esac'
        return program(folder / "bin", "squeue", lines).parent


def record(experiment: str, job_id: str, started: datetime, status: str, gpus: int, **changes: object) -> dict:
    """Return the record of a job. gpus: GPUs of the job, 0 for a job on the CPU."""
    made = copy.deepcopy(SAMPLE)
    stage = int(experiment[-1]) if "zero_" in experiment else None
    ranks = 2 if "2_gpus" in experiment else 1
    ended = status != "running"
    made |= {
        "experiment": f"experiments/{experiment}",
        "job_id": job_id,
        "status": status,
        "exit_code": {"completed": 0, "running": None, "stopped": 75}.get(status, 1),
        "started": started.isoformat(),
        "finished": (started + timedelta(minutes=6)).isoformat() if ended else None,
        "nodes": [f"gpu{int(job_id) % 7 + 1:02d}"],
        "world_size": ranks,
        "peak_process_mib": [594.4] * ranks,
        "git": {"commit": "82e46aa937dfa554eb105db9ed04c17dc4f23e5d", "dirty": False},
    }
    made["settings"] |= {"em_f1": False, "save_strategy": "no"}
    if stage is None:
        made["configs"]["deepspeed"] = made["settings"]["deepspeed"] = None
    else:
        made["configs"]["deepspeed"]["zero_optimization"] = {"stage": stage}
    if gpus:
        made["hardware"] |= {"gpu": "NVIDIA A100-SXM4-40GB", "gpus": gpus, "gpu_memory_mib": 40960}
        made["settings"] |= {"model_name": "bigscience/bloom-560m", "dataset": "squad", "fp16": True}
        made["configs"]["model"] |= {"hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}
    if status == "stopped":
        made["stop"] = {"signal": "SIGTERM", "step": 40, "checkpoint": f"output/{job_id}/checkpoint-40"}
    made["settings"] |= changes
    made["settings"]["per_device_eval_batch_size"] = made["settings"]["per_device_train_batch_size"]
    return made


def log_text(experiment: str, job_id: str, percent: int, *last: str, summary: str = "") -> str:
    steps = [f"step {i} of 94 ({100 * i // 94} %) after {2 * i} s" for i in range(5, 95, 5) if 100 * i // 94 <= percent]
    lines = [f"job {job_id} of experiments/{experiment}: site mycluster, 1 node(s) x 1 rank(s)", "nodes: gpu01", *steps]
    lines += [*last, *(["", LINE, f"status: {summary}", LINE] if summary else [])]
    return "\n".join(lines) + "\n"


def add_job(clone: Path, experiment: str, job_id: str, started: datetime, state: str, *, gpus: int = 0,
            error: str = "", percent: int = 100, **changes: object) -> Path:  # fmt: skip
    """Write the files of a job. state: a status of a record, or `refused` for a job that ended without a record."""
    folder = clone / "experiments" / experiment
    log = folder / "log" / f"{experiment.replace('/', '_')}_{job_id}.out"
    if state == "refused":
        write(log, log_text(experiment, job_id, 0, error, summary="failed (exit code 2)"))
        return folder
    codes = {"completed": "completed (exit code 0)", "stopped": "stopped (exit code 75)", "running": ""}
    write(log, log_text(experiment, job_id, percent, *([error] if error else []),
                        summary=codes.get(state, f"{state} (exit code 1)")))  # fmt: skip
    made = record(experiment, job_id, started, state, gpus, **changes)
    write(folder / "results" / f"{job_id}.json", json.dumps(made))
    write(folder / "cpu_memory" / f"cpu_memory_log_{job_id}.txt", cpu_log(*range(400, 1400, 4)))
    if gpus:
        samples = [min(9000, 1000 + 200 * i) for i in range(240)]
        write(folder / "gpu_memory" / f"gpu_memory_log_{job_id}.csv", gpu_log(*samples, gpus=gpus))
    return folder


def make_class(top: Path, experiments: list[str]) -> MadeUpClass:
    """Write a class in all states. The clone of the thirteenth participant is missing."""
    chance = random.Random(7)
    made = MadeUpClass()
    number = 4700
    for person, name in enumerate(NAMES):
        clone = top / "home" / name / "workshop"
        made.folders.append(clone)
        if person == 12:
            continue  # this clone is missing
        (clone / "experiments").mkdir(parents=True)
        for column, experiment in enumerate(experiments):
            number += 1
            job_id = str(number)
            started = START + timedelta(minutes=12 * column + chance.randrange(8))
            options: dict = {"gpus": 2 if "2_gpus" in experiment else 1}
            progress = chance.gauss(len(experiments) * (0.75 - 0.3 * person / len(NAMES)), 1.5)
            if column < progress - 2:
                fate = chance.random() * (1 if "zero_" in experiment else 0.58)
                if fate > 0.6:
                    continue  # each pair runs some of the stages
                if experiment == "baseline" and person in (3, 9):
                    options |= {"em_f1": True, "save_strategy": "epoch"}  # forgotten
                    add_job(clone, experiment, job_id, started, "completed", **options)
                elif person == 5 and column == 1:
                    add_job(clone, experiment, job_id, started, "completed", **options, per_device_train_batch_size=8)
                elif fate > 0.53:
                    error = ERRORS[chance.randrange(len(ERRORS))]
                    add_job(clone, experiment, job_id, started, "refused", error=error)
                elif fate > 0.5:
                    add_job(clone, experiment, job_id, started, "oom", error=NO_MEMORY, percent=0, **options)
                elif fate > 0.46:
                    add_job(clone, experiment, job_id, started, "stopped", percent=42, **options)
                else:
                    add_job(clone, experiment, job_id, started, "completed", **options)
            elif column < progress - 1:
                percent = chance.randrange(100)
                add_job(clone, experiment, job_id, started, "running", percent=percent, **options)
                made.queue.append(f"{job_id}|RUNNING|None|{clone}/experiments/{experiment}")
            elif column < progress:
                made.queue.append(f"{job_id}|PENDING|Resources|{clone}/experiments/{experiment}")
    return made
