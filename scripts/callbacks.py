"""What is watched while the Trainer trains."""

import time

import torch
from transformers import TrainerCallback

WARM_UP_STEPS = 3


class TrainSpeedCallback(TrainerCallback):
    """Rate of the optimizer steps alone: without the first steps, evaluation, saving and logging.

    The Trainer's own train_samples_per_second divides by everything between start and end.
    """

    def __init__(self, samples_per_step: float):
        """samples_per_step: of all ranks together, on average (an epoch's last step may hold fewer)."""
        self.samples_per_step, self.steps, self.seconds, self.started = samples_per_step, 0, 0.0, None

    def on_step_begin(self, args, state, control, **kwargs):
        if self.started is None and self.first_step_seen(state) >= WARM_UP_STEPS:
            self.started, self.steps_at_start = clock(), state.global_step

    def first_step_seen(self, state) -> int:
        """Steps done by this process: a resumed run warms up again."""
        if not hasattr(self, "first"):
            self.first = state.global_step
        return state.global_step - self.first

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_evaluate or control.should_save:
            self.pause(state)

    def on_epoch_end(self, args, state, control, **kwargs):
        self.pause(state)

    def pause(self, state) -> None:
        if self.started is not None:
            self.seconds += clock() - self.started
            self.steps += state.global_step - self.steps_at_start
            self.started = None

    def rates(self) -> dict:
        """steady_steps_per_second and steady_samples_per_second (of all ranks together), None without steps."""
        rate = self.steps / self.seconds if self.steps else None
        return {
            "steady_steps": self.steps,
            "steady_steps_per_second": rate and round(rate, 4),
            "steady_samples_per_second": rate and round(rate * self.samples_per_step, 3),
        }


def clock() -> float:
    """Seconds, once the GPU has done all that it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class RecordCallback(TrainerCallback):
    """Keeps the run record up to date, so that a killed run loses nothing that was measured."""

    def __init__(self, record):
        self.record = record

    def on_evaluate(self, args, state, control, **kwargs):
        self.record.update(eval=evaluations(state.log_history))


def evaluations(log_history: list[dict]) -> list[dict]:
    """One entry per evaluation, from the Trainer's log."""
    return [
        {
            "epoch": entry["epoch"],
            "step": entry["step"],
            "loss": entry["eval_loss"],
            "runtime_s": entry["eval_runtime"],
            "samples_per_second": entry["eval_samples_per_second"],
        }
        for entry in log_history
        if "eval_loss" in entry
    ]
