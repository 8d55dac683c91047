"""The time of each part of a step (--profile), averaged over three steps that PyTorch's profiler traces.

The phases of a step are those of the Trainer's loop: data, forward, backward, optimizer. Communication is counted
separately: the time in which a collective runs and nothing is computed. Communication that runs during computation is
hidden, and has its own number. On a GPU each phase ends with a wait for all kernels, so that each kernel counts in its
own phase. These waits make the profiled steps slower, so the steady rates exclude them.
"""

import atexit
import contextlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from transformers import Trainer, TrainerCallback

from distributed.collectives import gather_lists, rank
from measure.speed import PROFILED_STEPS, WARM_UP_STEPS
from records.writer import RunRecord

STEP = "ProfilerStep#"  # prefix of PyTorch's name for a step; the number of the step follows
LAST_STEP = WARM_UP_STEPS + PROFILED_STEPS
# The phases of a step, and the methods of the Trainer that they consist of. `backward` contains `forward`
PHASES = {
    "data": "get_batch_samples",
    "forward": "compute_loss",
    "backward": "training_step",
    "optimizer": "_clip_grad_norm",
}
Interval = tuple[int, int]  # nanoseconds


class ProfileCallback(TrainerCallback):
    """Callback that profiles the steps after the warm-up on every rank, and writes the breakdown into the record."""

    def __init__(self, trainer: Trainer, record: RunRecord):
        self.trainer = trainer
        mark_phases(trainer, self.phase)
        self.record = record
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # The profiler warms up in the last step of our own warm-up
        steps = schedule(wait=WARM_UP_STEPS - 1, warmup=1, active=PROFILED_STEPS, repeat=1)
        # Without acc_events PyTorch warns that events of earlier cycles are lost, but there is only one cycle
        self.profiler = profile(activities=activities, schedule=steps, record_shapes=True, acc_events=True)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        # DeepSpeed's engine steps at the end of its backward pass and calls no callback, so wrap its step method
        stepping: Any = self.trainer.model_wrapped if self.trainer.is_deepspeed_enabled else self.trainer.optimizer
        stepping.step = self.phase("optimizer")(stepping.step)
        self.profiler.start()
        # Without this, the process crashes at exit if a stop or an error ends it within the profiled steps
        atexit.register(self.profiler.stop)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase of a step in the trace."""
        with record_function(name):
            yield
            self.wait_in_profiled_step()

    def wait_in_profiled_step(self) -> None:
        """Wait for the GPU, but only in the profiled steps. In other steps the wait would slow the training down."""
        if torch.cuda.is_available() and WARM_UP_STEPS <= self.profiler.step_num < LAST_STEP:
            torch.cuda.synchronize()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.wait_in_profiled_step()
        self.profiler.step()
        # on_trace_ready would not work here: the profiler may call it at different steps on different ranks, or at exit
        if self.profiler.step_num == LAST_STEP:
            self.write()

    def write(self) -> None:
        """Write the trace of this rank and the breakdown of all ranks. Collective."""
        recorded: Any = self.profiler.profiler
        found = breakdown(recorded.kineto_results.events())
        trace = Path("profile") / self.record.content["job_id"] / f"rank_{rank()}.json.gz"
        trace.parent.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(trace))
        ranks = [own for (own,) in gather_lists([found | {"trace": str(trace)}])]
        self.record.update(profile=ranks)
        if rank() == 0:
            print(table(ranks), flush=True)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self.profiler.step_num < LAST_STEP:
            reason = f"too few steps: steps {WARM_UP_STEPS + 1} to {LAST_STEP} are profiled"
            self.record.missing("profile", reason)


def mark_phases(trainer: Trainer, phase: Callable[[str], contextlib.ContextDecorator]) -> None:
    """Enter `phase(name)` around each phase of a step. Call this before the training."""
    for name, method in PHASES.items():
        setattr(trainer, method, phase(name)(getattr(trainer, method)))


def breakdown(events: list) -> dict:
    """Return the average seconds per step of each phase.

    events: the profiler's records, of the type torch._C._autograd._KinetoEvent.
    """
    running = {name: [interval(e) for e in events if e.name() == name and is_on_cpu(e)] for name in PHASES}
    # PyTorch's step begins when the previous step ends, so it includes logging and evaluation between the steps. Here a
    # step begins with its data phase
    starts = sorted(start for start, _ in running["data"])
    ends = sorted(interval(event)[1] for event in events if event.name().startswith(STEP) and is_on_cpu(event))
    steps = list(zip(starts, ends, strict=False))
    running["step"] = steps
    running["communication"] = [interval(event) for event in events if is_communication(event)]
    running["computation"] = [interval(event) for event in events if is_computation(event)]
    total = dict.fromkeys((*PHASES, "communication", "other", "hidden_communication"), 0)
    for names, nanoseconds in overlap_times(running).items():
        if "step" in names:
            total[step_part(names)] += nanoseconds
            if names >= {"communication", "computation"}:
                total["hidden_communication"] += nanoseconds
    whole = sum(end - start for start, end in steps)
    per_step = {name: round(value / len(steps) / 1e9, 5) for name, value in total.items()}
    found = {"steps": len(steps), "seconds_per_step": round(whole / len(steps) / 1e9, 5), **per_step}
    if torch.cuda.is_available():
        # A copy is not a kernel. With DeepSpeed, the last backward phase of a step contains the optimizer's phase
        started = [e.start_ns() for e in events if is_computation(e) and not e.name().startswith(("Memcpy", "Memset"))]
        kernels = count_within(started, running["backward"]) - count_within(started, nested(running))
        found["kernels_per_micro_batch"] = kernels / len(running["backward"])
    return found


def nested(running: dict[str, list[Interval]]) -> list[Interval]:
    """Return the optimizer's phases that begin within a backward phase."""
    return [phase for phase in running["optimizer"] if count_within([phase[0]], running["backward"])]


def count_within(times: list[int], intervals: list[Interval]) -> int:
    """Return the number of times within intervals that do not overlap each other."""
    ordered = sorted(times)
    return sum(bisect_left(ordered, end) - bisect_left(ordered, start) for start, end in intervals)


def step_part(names: frozenset[str]) -> str:
    """Return the part of a step to which a time belongs. names: everything that runs at that time.

    Forward pass and optimizer have precedence over the backward phase, because the backward phase contains the
    forward pass, and with DeepSpeed also the optimizer.
    """
    if "communication" in names and "computation" not in names:
        return "communication"
    return next((name for name in ("data", "forward", "optimizer", "backward") if name in names), "other")


def overlap_times(running: dict[str, list[Interval]]) -> Counter[frozenset[str]]:
    """Map each set of names to the nanoseconds in which exactly these names run.

    running: name -> intervals, which may overlap.
    """
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
    """Return whether the event is a collective: an operation of gloo on the CPU, or a kernel of NCCL on a GPU."""
    if is_on_cpu(event):
        return event.name().startswith("gloo:") and not torch.cuda.is_available()
    return event.name().startswith("nccl")


def is_computation(event: Any) -> bool:
    """Return whether the event is a computation: an operator of PyTorch, or on a GPU a kernel that is not NCCL's."""
    if torch.cuda.is_available():
        # Annotations are not kernels: they cover a range of kernels, which may include collectives
        return not is_on_cpu(event) and not is_communication(event) and not event.is_user_annotation()
    return is_on_cpu(event) and event.name().startswith("aten::")


def interval(event: Any) -> Interval:
    return event.start_ns(), event.start_ns() + event.duration_ns()


def table(ranks: list[dict]) -> str:
    """Return the breakdown of each rank, in milliseconds and in percent of its step."""
    lines = ["", "profile of a step     " + "".join(f"{f'rank {number}':>20}" for number in range(len(ranks)))]
    for name in (*PHASES, "communication", "other"):
        cells = (f"{1000 * r[name]:10.1f} ms {100 * r[name] / r['seconds_per_step']:4.0f} %" for r in ranks)
        lines.append(f"{name:22}" + "".join(f"{cell:>20}" for cell in cells))
    hidden = (f"{1000 * r['hidden_communication']:10.1f} ms       " for r in ranks)
    lines.append(f"{'  hidden communication':22}" + "".join(f"{cell:>20}" for cell in hidden))
    if "kernels_per_micro_batch" in ranks[0]:
        numbers = (f"{r['kernels_per_micro_batch']:10,.0f}          " for r in ranks)
        lines.append(f"{'kernels / micro batch':22}" + "".join(f"{number:>20}" for number in numbers))
    lines.append(f"traces: {Path(ranks[0]['trace']).parent}; open them in https://ui.perfetto.dev")
    return "\n".join(lines)
