"""Where the time of a step goes: a trace of three steps by PyTorch's profiler, and what it adds up to (--profile).

The phases of a step are those of the Trainer's loop: data, forward, backward, optimizer. Communication is taken out of
them: the time in which a collective runs and nothing is computed beside it. What is hidden behind computation is
counted apart. On a GPU all work is waited for between two phases, so that each kernel counts where it belongs; steps
that are profiled are therefore slower, and left out of the steady rates.
"""

import atexit
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback

from distributed.collectives import gather_lists, rank
from records.writer import RunRecord
from training.speed import PROFILED_STEPS, WARM_UP_STEPS
from training.trainer import WorkshopTrainer

PHASES = ("data", "forward", "backward", "optimizer")
STEP = "profiled step"
Interval = tuple[int, int]  # nanoseconds


class ProfileCallback(TrainerCallback):
    """Profiles the steps behind the warm-up, on every rank, and writes the breakdown into the record."""

    def __init__(self, trainer: WorkshopTrainer, record: RunRecord):
        self.trainer = trainer
        trainer.phase = self.phase
        self.record = record
        self.trace = Path("profile") / record.content["job_id"] / f"rank_{rank()}.json.gz"
        self.profiler: Any = None
        self.step: Any = None
        self.optimizer_step: Any = None
        self.steps_seen = 0
        self.done = False

    def on_train_begin(self, args, state, control, **kwargs):
        if self.trainer.is_deepspeed_enabled:
            # its backward pass ends in its own step, of which it tells no callback
            engine = self.trainer.model_wrapped
            engine.step = self.phase("optimizer")(engine.step)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The Trainer is in this part of a step."""
        if name == "data" and self.steps_seen >= WARM_UP_STEPS and not self.done:
            self.begin_step()  # before on_step_begin, as the batches are fetched first
        if self.step is None:
            yield
            return
        with record_function(name):
            yield
            wait_for_gpu()

    def begin_step(self) -> None:
        wait_for_gpu()
        if self.profiler is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self.profiler = profile(activities=activities, record_shapes=True)
            self.profiler.start()
            atexit.register(self.stop)
        self.step = record_function(STEP)
        self.step.__enter__()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.optimizer_step = self.phase("optimizer")
        self.optimizer_step.__enter__()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.optimizer_step.__exit__(None, None, None)

    def on_step_end(self, args, state, control, **kwargs):
        self.steps_seen += 1
        if self.step is None:
            return
        wait_for_gpu()
        self.step.__exit__(None, None, None)
        self.step = None
        if self.steps_seen == WARM_UP_STEPS + PROFILED_STEPS:
            self.finish()

    def stop(self) -> None:
        """A process that ends under a running profiler crashes: a training that stops or fails within these steps."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None

    def finish(self) -> None:
        """Write the trace of this rank, and the breakdown of all. Collective."""
        self.done = True
        profiler = self.profiler
        self.stop()
        found = breakdown(profiler.profiler.kineto_results.events())
        self.trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.trace))
        ranks = [of_rank for (of_rank,) in gather_lists([found | {"trace": str(self.trace)}])]
        self.record.update(profile=ranks)
        if rank() == 0:
            print(table(ranks), flush=True)

    def on_train_end(self, args, state, control, **kwargs):
        if not self.done:
            first = WARM_UP_STEPS + 1
            reason = f"too few steps: it is taken of steps {first} to {WARM_UP_STEPS + PROFILED_STEPS}"
            self.record.missing("profile", reason)


def wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def breakdown(events: list) -> dict:
    """Seconds of a step, on average, by phase.

    events: as the profiler has recorded them, torch._C._autograd._KinetoEvent.
    """
    steps = [interval(event) for event in events if event.name() == STEP and is_on_cpu(event)]
    phases = {name: [interval(e) for e in events if e.name() == name and is_on_cpu(e)] for name in PHASES}
    # what lies in them counts there: the forward pass, and with DeepSpeed the optimizer
    phases["backward"] = without(phases["backward"], phases["forward"] + phases["optimizer"])
    communication = within(union([interval(event) for event in events if is_communication(event)]), steps)
    computation = union([interval(event) for event in events if is_computation(event)])
    waiting = without(communication, computation)
    seconds = {name: length(without(within(union(parts), steps), waiting)) for name, parts in phases.items()}
    seconds["communication"] = length(waiting)
    whole = length(steps)
    seconds["other"] = whole - sum(seconds.values())
    hidden = length(communication) - length(waiting)
    per_step = {name: round(value / len(steps) / 1e9, 5) for name, value in seconds.items()}
    return {
        "steps": len(steps),
        "seconds_per_step": round(whole / len(steps) / 1e9, 5),
        **per_step,
        "hidden_communication": round(hidden / len(steps) / 1e9, 5),
    }


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


def union(intervals: list[Interval]) -> list[Interval]:
    """The same time, in intervals that do not overlap, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def without(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """The time of these in which none of the others is. Both are made disjoint first."""
    left: list[Interval] = []
    others = union(others)
    position = 0
    for start, end in union(intervals):
        while position < len(others) and others[position][0] < end:
            other_start, other_end = others[position]
            if other_start > start:
                left.append((start, other_start))
            start = max(start, other_end)
            if other_end > end:  # it may cover some of the next one, too
                break
            position += 1
        if start < end:
            left.append((start, end))
    return left


def within(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """The time that is in both."""
    return without(intervals, without(intervals, others))


def length(intervals: list[Interval]) -> int:
    return sum(end - start for start, end in intervals)


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
