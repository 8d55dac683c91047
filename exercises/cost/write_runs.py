"""Write the run records and logs of the exercise in docs/cost.md. No GPU was measured: a power model computes them.

    python exercises/cost/write_runs.py

This file shows the cause of each curve, so fill in the table of the page first.

The model: a modelled GPU has a limit of 300 W. It draws 270 W while it computes, 100 W while a kernel of NCCL waits for
another GPU, and 60 W while no kernel runs. Evaluation draws 200 W. The power of a phase is the mean over its time.
"""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIMIT, COMPUTING, EVALUATING, WAITING, IDLE = 300, 270, 200, 100, 60  # W
GPU = f"modelled GPU (limit {LIMIT} W)"
INTERVAL = 10  # seconds between two samples; each phase takes a multiple of it
START = datetime.fromisoformat("2027-01-11T09:00:00+00:00")  # of the training
LOADING = 10  # seconds before the training, in which the logs already run
QUESTIONS, BATCH, EPOCHS = 960, 16, 2  # questions of an epoch, questions of an optimizer step
TOKENS = 160  # real tokens of a question
EPOCH = 170  # seconds of an epoch's steps on one GPU that never waits
HANG_TIMEOUT = 600  # seconds


def mean_power(computing: float, waiting: float = 0) -> float:
    """Mean power of a GPU that computes, waits in NCCL, and otherwise is idle. Both are shares of the time."""
    return COMPUTING * computing + WAITING * waiting + IDLE * (1 - computing - waiting)


@dataclass
class Phase:
    """A time in which all GPUs of a run draw the same constant power."""

    what: str  # steps, evaluation, saving, loading or hang
    seconds: int
    watts: float
    utilisation: int  # percent of the time in which a kernel runs


@dataclass
class Run:
    """A modelled run. cpu: percent of one core. mib, cpu_mib: GPU memory and CPU memory in use."""

    gpus: int
    phases: list[Phase]  # from the start of the training
    mib: int
    cpu: int
    cpu_mib: int
    completed: bool = True

    @property
    def steps(self) -> list[Phase]:
        return [phase for phase in self.phases if phase.what == "steps"]


def steps(seconds: int, utilisation: int, computing: float, waiting: float = 0) -> Phase:
    return Phase("steps", seconds, mean_power(computing, waiting), utilisation)


def epoch(steps_of_epoch: list[Phase], evaluation: int) -> list[Phase]:
    """Return the steps, the evaluation, and the saving of a checkpoint, during which the GPU is idle."""
    return [*steps_of_epoch, Phase("evaluation", evaluation, EVALUATING, 90), Phase("saving", 10, IDLE, 0)]


EFFICIENCY = 0.85  # of two GPUs
TWO_GPUS = steps(100, 100, computing=EFFICIENCY, waiting=1 - EFFICIENCY)
# The loader fills its buffer for 10 seconds, and the GPU empties it in 10 seconds
STARVING = [steps(INTERVAL, 98, computing=1), steps(INTERVAL, 0, computing=0)] * (EPOCH // INTERVAL)
OFFLOAD = steps(420, 40, computing=EPOCH / 420)
HANG = Phase("hang", HANG_TIMEOUT, WAITING, 100)
RUNS = {
    "A": Run(1, EPOCHS * epoch(STARVING, 20), mib=14200, cpu=100, cpu_mib=3100),
    "B": Run(
        2, [*epoch([TWO_GPUS], 10), steps(60, 100, EFFICIENCY, 1 - EFFICIENCY), HANG],
        mib=14200, cpu=200, cpu_mib=6200, completed=False,
    ),
    "C": Run(1, EPOCHS * epoch([OFFLOAD], 20), mib=6900, cpu=1200, cpu_mib=14900),
    "D": Run(2, EPOCHS * epoch([TWO_GPUS], 10), mib=14200, cpu=200, cpu_mib=6200),
    "E": Run(1, EPOCHS * epoch([steps(EPOCH, 98, computing=1)], 20), mib=14200, cpu=100, cpu_mib=3100),
}  # fmt: skip


def duration(phases: list[Phase]) -> int:
    return sum(phase.seconds for phase in phases)


def joules(phases: list[Phase]) -> float:
    """Energy of one GPU."""
    return sum(phase.seconds * phase.watts for phase in phases)


def pauses(phases: list[Phase]) -> list[dict]:
    """Return the times of evaluations and saves."""
    found, start = [], START
    for phase in phases:
        end = start + timedelta(seconds=phase.seconds)
        if phase.what in ("evaluation", "saving"):
            found.append({"what": phase.what, "started": start.isoformat(), "finished": end.isoformat()})
        start = end
    return found


def record(job: str, run: Run) -> dict:
    """Return the run record. A failed run has no energy, as a real one."""
    found = {
        "schema": 1,
        "status": "completed" if run.completed else "failed",
        "exit_code": 0 if run.completed else 3,
        "job_id": job,
        "experiment": f"exercises/cost/{job}",
        "run_name": "computed by a power model: no GPU was measured",
        "command": ["exercises/cost/write_runs.py"],
        "started": START.isoformat(),
        "finished": (START + timedelta(seconds=duration(run.phases))).isoformat(),
        "nodes": ["modelled"],
        "world_size": run.gpus,
        "hardware": {"gpu": GPU, "gpus": run.gpus, "gpu_power_limit_w": LIMIT, "cpu": "modelled CPU", "cpus": 16},
        "settings": {"model_name": "modelled", "per_device_train_batch_size": 4, "train_size": QUESTIONS},
        "pauses": pauses(run.phases),
    }
    if not run.completed:
        ranks = "rank 0 on modelled, rank 1 on modelled"
        reason = f"hang: no progress of {ranks}, noticed by rank 0 on modelled after {HANG_TIMEOUT} s"
        return found | {"reason": reason}
    energy, seconds, questions = joules(run.steps), duration(run.steps), EPOCHS * QUESTIONS
    each = energy * run.gpus / questions
    return found | {
        "steps_per_epoch": QUESTIONS // BATCH,
        "train_size": QUESTIONS,
        "train": {
            "steps": questions // BATCH,
            "runtime_s": duration(run.phases),
            "samples_per_second": round(questions / duration(run.phases), 3),
            "steady_samples_per_second": round(questions / seconds, 3),
            "steady_steps": questions // BATCH,
            "real_tokens": questions * TOKENS,
        },
        "callbacks": {
            "avg_gpu_util_%": round(sum(phase.utilisation * phase.seconds for phase in run.steps) / seconds, 1)
        },
        "energy": {
            "steady_joules": [round(energy, 1)] * run.gpus,
            "steady_joules_sum": round(energy * run.gpus, 1),
            "joules_per_question": round(each, 2),
            "joules_per_1000_tokens": round(1000 * each / TOKENS, 1),
            "mean_watts": round(energy / seconds, 1),
            "kwh": round(joules(run.phases) * run.gpus / 3.6e6, 6),
        },
        "gpu_activity": None,
        "missing": {"gpu_activity": "the model has no SMs"},
    }


def samples(run: Run) -> list[tuple[int, Phase]]:
    """Return the time of each sample, in seconds from the start of the training, and its phase.

    A sample is in the middle of an interval, so the sum of the samples times INTERVAL is the energy of the whole log.
    """
    phases = [Phase("loading", LOADING, IDLE, 0), *run.phases]
    each = [phase for phase in phases for _ in range(phase.seconds // INTERVAL)]
    return [(number * INTERVAL + INTERVAL // 2 - LOADING, phase) for number, phase in enumerate(each)]


def gpu_log(run: Run) -> str:
    """Return the log in the format of nvidia-smi with csv,nounits."""
    lines = [
        "timestamp, index, name, memory.used [MiB], memory.total [MiB], power.draw [W], utilization.gpu [%]",
    ]
    for second, phase in samples(run):
        time = START + timedelta(seconds=second)
        mib = 500 if phase.what == "loading" else run.mib
        for gpu in range(run.gpus):
            watts = f"{phase.watts:.2f}, {phase.utilisation}"
            lines.append(f"{time:%Y/%m/%d %H:%M:%S}.000, {gpu}, {GPU}, {mib}, 32768, {watts}")
    return "\n".join(lines) + "\n"


def cpu_log(run: Run) -> str:
    """Return the log in the format of psrecord."""
    lines = ["# Elapsed time   CPU (%)     Real (MB)   Virtual (MB)"]
    for second, _ in samples(run):
        lines.append(f"{second + LOADING:12.3f} {run.cpu:12.3f} {run.cpu_mib:12.3f} {2 * run.cpu_mib:12.3f}")
    return "\n".join(lines) + "\n"


def write_runs(folder: Path) -> None:
    for job, run in RUNS.items():
        files = {
            f"results/{job}.json": json.dumps(record(job, run), indent=1) + "\n",
            f"gpu_memory/gpu_memory_log_{job}.csv": gpu_log(run),
            f"cpu_memory/cpu_memory_log_{job}.txt": cpu_log(run),
        }
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_runs(FOLDER)
