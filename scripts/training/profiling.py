"""Where the time of a step goes (--profile): PyTorch's profiler traces three steps, and this module adds them up.

The phases of a step are those of the Trainer's loop: data, forward, backward, optimizer. Communication is counted apart
from them: the time in which a collective runs and nothing is computed next to it. Communication that computation hides
has its own number. On a GPU each phase ends with a wait for all kernels, so that each kernel counts in its own phase.
This makes the profiled steps slower, and the steady rates leave them out.
"""

import atexit
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from transformers import TrainerCallback

from distributed.collectives import gather_lists, rank
from records.writer import RunRecord
from training.speed import PROFILED_STEPS, WARM_UP_STEPS
from training.trainer import WorkshopTrainer

PHASES = ("data", "forward", "backward", "optimizer")
STEP = "ProfilerStep#"  # PyTorch's name of a step, without its number
LAST_STEP = WARM_UP_STEPS + PROFILED_STEPS
Interval = tuple[int, int]  # nanoseconds


class ProfileCallback(TrainerCallback):
    """Profiles the steps after the warm-up, on every rank, and writes the breakdown into the record."""

    def __init__(self, trainer: WorkshopTrainer, record: RunRecord):
        self.trainer = trainer
        trainer.phase = self.phase
        self.record = record
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # the profiler warms up in the last step of our own warm-up
        steps = schedule(wait=WARM_UP_STEPS - 1, warmup=1, active=PROFILED_STEPS, repeat=1)
        self.profiler = profile(activities=activities, schedule=steps, record_shapes=True)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        # DeepSpeed's engine steps at the end of its backward pass, and calls no callback for it
        stepping: Any = self.trainer.model_wrapped if self.trainer.is_deepspeed_enabled else self.trainer.optimizer
        stepping.step = self.phase("optimizer")(stepping.step)
        self.profiler.start()
        # a process crashes if it ends while the profiler runs, as after a stop or an error within the profiled steps
        atexit.register(self.profiler.stop)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a part of a step in the trace."""
        with record_function(name):
            yield
            self.wait_in_profiled_step()

    def wait_in_profiled_step(self) -> None:
        """Wait for the GPU, in the profiled steps only: in the others it would slow the training down."""
        if torch.cuda.is_available() and WARM_UP_STEPS <= self.profiler.step_num < LAST_STEP:
            torch.cuda.synchronize()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.wait_in_profiled_step()
        self.profiler.step()
        # not as the profiler's on_trace_ready: it may call that at different steps on different ranks, and at exit
        if self.profiler.step_num == LAST_STEP:
            self.write()

    def write(self) -> None:
        """Write the trace of this rank, and the breakdown of all ranks. Collective."""
        recorded: Any = self.profiler.profiler
        found = breakdown(recorded.kineto_results.events())
        trace = Path("profile") / self.record.content["job_id"] / f"rank_{rank()}.json.gz"
        trace.parent.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(trace))
        ranks = [of_rank for (of_rank,) in gather_lists([found | {"trace": str(trace)}])]
        self.record.update(profile=ranks)
        if rank() == 0:
            print(table(ranks), flush=True)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self.profiler.step_num < LAST_STEP:
            reason = f"too few steps: it is taken of steps {WARM_UP_STEPS + 1} to {LAST_STEP}"
            self.record.missing("profile", reason)


def breakdown(events: list) -> dict:
    """Seconds of a step, on average, by phase.

    events: what the profiler has recorded, torch._C._autograd._KinetoEvent.
    """
    running = {name: [interval(e) for e in events if e.name() == name and is_on_cpu(e)] for name in PHASES}
    # PyTorch's step begins when the one before ends, and includes what the Trainer does in between: logs, evaluations
    starts = sorted(start for start, _ in running["data"])
    ends = sorted(interval(event)[1] for event in events if event.name().startswith(STEP) and is_on_cpu(event))
    steps = list(zip(starts, ends, strict=False))
    running["step"] = steps
    running["communication"] = [interval(event) for event in events if is_communication(event)]
    running["computation"] = [interval(event) for event in events if is_computation(event)]
    total = dict.fromkeys((*PHASES, "communication", "other", "hidden_communication"), 0)
    for together, nanoseconds in overlap_times(running).items():
        if "step" in together:
            total[step_part(together)] += nanoseconds
            if together >= {"communication", "computation"}:
                total["hidden_communication"] += nanoseconds
    whole = sum(end - start for start, end in steps)
    per_step = {name: round(value / len(steps) / 1e9, 5) for name, value in total.items()}
    return {"steps": len(steps), "seconds_per_step": round(whole / len(steps) / 1e9, 5), **per_step}


def step_part(together: frozenset[str]) -> str:
    """The part of a step in which time counts, of all that runs then.

    The backward phase contains the forward pass, and with DeepSpeed the optimizer, which count on their own.
    """
    if "communication" in together and "computation" not in together:
        return "communication"
    return next((name for name in ("data", "forward", "optimizer", "backward") if name in together), "other")


def overlap_times(running: dict[str, list[Interval]]) -> Counter[frozenset[str]]:
    """Names -> nanoseconds in which these run, and no other does. running: name -> intervals, which may overlap."""
    changes = [(start, name, 1) for name, intervals in running.items() for start, _ in intervals]
    changes += [(end, name, -1) for name, intervals in running.items() for _, end in intervals]
    found: Counter[frozenset[str]] = Counter()
    active = dict.fromkeys(running, 0)
    before = 0
    for time, name, change in sorted(changes):
        found[frozenset(each for each, number in active.items() if number)] += time - before
        before = time
        active[name] += change
    return found


def is_on_cpu(event: Any) -> bool:
    return event.device_type() == torch.profiler.DeviceType.CPU


def is_communication(event: Any) -> bool:
    """A collective on its way: gloo's on the CPU, NCCL's kernels on a GPU."""
    if is_on_cpu(event):
        return event.name().startswith("gloo:") and not torch.cuda.is_available()
    return event.name().startswith("nccl")


def is_computation(event: Any) -> bool:
    """An operator of PyTorch on the CPU; a kernel that is none of NCCL's on a GPU."""
    if torch.cuda.is_available():
        # annotations span kernels, those of collectives too
        return not is_on_cpu(event) and not is_communication(event) and not event.is_user_annotation()
    return is_on_cpu(event) and event.name().startswith("aten::")


def interval(event: Any) -> Interval:
    return event.start_ns(), event.start_ns() + event.duration_ns()


def table(ranks: list[dict]) -> str:
    """The breakdown of each rank, in milliseconds and percent of its step."""
    lines = ["", "profile of a step     " + "".join(f"{f'rank {number}':>20}" for number in range(len(ranks)))]
    for name in (*PHASES, "communication", "other"):
        cells = (f"{1000 * r[name]:10.1f} ms {100 * r[name] / r['seconds_per_step']:4.0f} %" for r in ranks)
        lines.append(f"{name:22}" + "".join(f"{cell:>20}" for cell in cells))
    hidden = (f"{1000 * r['hidden_communication']:10.1f} ms       " for r in ranks)
    lines.append(f"{'  hidden beside it':22}" + "".join(f"{cell:>20}" for cell in hidden))
    lines.append(f"traces: {Path(ranks[0]['trace']).parent}; open them in https://ui.perfetto.dev")
    return "\n".join(lines)
