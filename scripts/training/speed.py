"""Rate and energy of the optimizer steps, without start, evaluation, saving and logging."""

import math
import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distributed.collectives import gather_lists, world_size
from training.energy import EnergyMeter, describe_energy
from training.flops import KINDS_OF_TOKENS, ModelFlops

WARM_UP_STEPS = 3
PROFILED_STEPS = 3


class TrainSpeedCallback(TrainerCallback):
    """Callback that measures the steady steps: optimizer steps after the warm-up, without evaluation and saving.

    The Trainer's own train_samples_per_second divides by all the time between start and end.
    """

    def __init__(
        self, trainer: Any, energy: EnergyMeter, flops: ModelFlops | None, peak: float, profiled: bool = False
    ):
        """trainer: a WorkshopTrainer, which counts the tokens. peak: operations per second of one rank, for MFU.

        profiled: True if the steps after the warm-up are profiled. Profiled steps are slow, so they count as warm-up.
        """
        self.trainer = trainer
        self.energy = energy
        self.flops = flops
        self.peak = peak
        self.warm_up_steps = WARM_UP_STEPS + (PROFILED_STEPS if profiled else 0)
        self.warm_up_seconds: float | None = None
        # Counts of the steady steps
        self.steps = 0
        self.seconds = 0.0
        self.joules = 0.0  # energy of this rank's GPU in this run, NaN if unknown
        self.tokens = torch.zeros_like(trainer.tokens)
        # Counts of all ranks in earlier runs of this training: one row for all steps, one for the steady steps
        self.earlier_tokens = torch.zeros(2, KINDS_OF_TOKENS, dtype=torch.int64)
        self.earlier_joules = [0.0] * world_size()  # energy of each rank's GPU in the steady steps of earlier runs
        self.started: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begun = clock()
        self.first_step = state.global_step  # a resumed run warms up again

    def resume_counts(self, steps: int, seconds: float, tokens: list[list[int]], joules: list[float | None]) -> None:
        """Continue the counts of the runs before the checkpoint."""
        self.steps = steps
        self.seconds = seconds
        self.earlier_tokens = torch.tensor(tokens)
        if steps:
            if len(joules) != world_size():
                joules = [None] * world_size()
            self.earlier_joules = [math.nan if each is None else each for each in joules]

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.started is None and state.global_step - self.first_step >= self.warm_up_steps:
            self.started = clock()
            if self.warm_up_seconds is None:
                self.warm_up_seconds = self.started - self.begun
            self.steps_at_start = state.global_step
            self.tokens_at_start = self.trainer.tokens
            self.joules_at_start = self.energy.joules()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_evaluate or control.should_save:
            self.pause(state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.pause(state)

    def pause(self, state: TrainerState) -> None:
        if self.started is not None:
            self.seconds += clock() - self.started
            self.steps += state.global_step - self.steps_at_start
            self.tokens = self.tokens + self.trainer.tokens - self.tokens_at_start
            self.joules += self.energy.joules() - self.joules_at_start
            self.started = None

    def all_tokens(self) -> list[list[int]]:
        """Return the token counts of all ranks, including earlier runs: all steps, and the steady steps. Collective."""
        ranks = gather_lists([self.trainer.tokens.tolist(), self.tokens.tolist()])
        group_size = self.trainer.get_tp_size()  # all ranks of a tensor group count the same tokens
        return (torch.tensor(ranks).sum(0) // group_size + self.earlier_tokens).tolist()

    def all_joules(self) -> list[float]:
        """Return the joules of each rank's GPU in the steady steps, including earlier runs. Collective."""
        ranks = [joules for (joules,) in gather_lists([self.joules])]
        return [own + earlier for own, earlier in zip(ranks, self.earlier_joules, strict=True)]

    @property
    def samples_per_step(self) -> float:
        """Mean number of questions, because the last step of an epoch may have fewer."""
        return len(self.trainer.train_dataset) / self.trainer.steps_per_epoch

    def steady_energy(self) -> dict:
        """Return the energy of the steady steps as in the run record, or an empty dict if it is unknown. Collective."""
        joules = self.all_joules()
        _, (steady_real, *_) = self.all_tokens()
        if not self.steps or math.isnan(sum(joules)):
            return {}
        return describe_energy(joules, self.seconds, self.steps * self.samples_per_step, steady_real)

    def summary(self) -> dict:
        """Return the steady rates of all ranks together, the warm-up time, token counts, and MFU. Collective."""
        whole, steady = self.all_tokens()
        real, padding, counted, _ = whole
        steady_real, _, steady_counted, steady_squares = steady
        rate = tokens_per_second = mfu = None
        if self.steps:
            rate = self.steps / self.seconds
            tokens_per_second = round(steady_real / self.seconds, 1)
        if self.steps and self.flops:
            needed = self.flops.count_operations(steady_real, steady_counted, steady_squares)
            mfu = round(100 * needed / (self.seconds * self.peak * world_size()), 2)
            if mfu > 100:  # the measured peak is too low, because the machine was busy
                mfu = None
        return {
            "warm_up_seconds": self.warm_up_seconds and round(self.warm_up_seconds, 2),
            "steady_steps": self.steps,
            "steady_steps_per_second": rate and round(rate, 4),
            "steady_samples_per_second": rate and round(rate * self.samples_per_step, 3),
            "real_tokens": real,
            "padding_tokens": padding,
            "counted_tokens": counted,
            "steady_tokens_per_second": tokens_per_second,
            "mfu_percent": mfu,
            "matmul_peak_tflops": round(self.peak / 1e12, 4),
        }


def clock() -> float:
    """Return the time in seconds, after waiting for the GPU to finish its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
