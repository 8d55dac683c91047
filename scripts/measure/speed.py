"""Rate and energy of the optimizer steps, without start, evaluation, saving and logging."""

import math
import time
from typing import Any

import torch

from distributed.collectives import gather_lists, ranks_per_gpu, world_size
from measure.energy import EnergyMeter
from measure.flops import KINDS_OF_TOKENS, ModelFlops
from records.writer import RunRecord

WARM_UP_STEPS = 3
PROFILED_STEPS = 3
TOO_FEW_STEPS = "too few steps after the warm-up"
SHARED_GPU = "ranks share a GPU (RANKS_PER_GPU), where they wait for each other"
RATES = ("samples_per_second", "steps_per_second")  # of the Trainer
STEADY_RATES = ("steady_samples_per_second", "steady_tokens_per_second", "mfu_percent")


class TrainSpeed:
    """Measure the steady steps: optimizer steps after the warm-up, without evaluation and saving.

    The Trainer's own train_samples_per_second divides by all the time between start and end.
    """

    def __init__(
        self, trainer: Any, energy: EnergyMeter, flops: ModelFlops | None, peak: float, profiled: bool = False
    ):
        """Create this when the training begins. trainer: a WorkshopTrainer, which counts the tokens.

        peak: operations per second of one rank, for MFU. profiled: True if the steps after the warm-up are profiled.
        Profiled steps are slow, so they count as warm-up.
        """
        self.trainer = trainer
        self.energy = energy
        self.flops = flops
        self.peak = peak
        # A resumed run warms up again
        self.first_step = trainer.state.global_step + WARM_UP_STEPS + (PROFILED_STEPS if profiled else 0)
        self.warm_up_seconds: float | None = None
        # Counts of the steady steps
        self.steps = 0
        self.seconds = 0.0
        self.joules = 0.0  # energy of this rank's GPU in this run, NaN if unknown
        self.tokens = torch.zeros(KINDS_OF_TOKENS, dtype=torch.int64, device=trainer.args.device)
        self.all_tokens = self.tokens  # counts of all steps of this run
        # Counts of all ranks in earlier runs of this training: one row for all steps, one for the steady steps
        self.earlier_tokens = torch.zeros(2, KINDS_OF_TOKENS, dtype=torch.int64)
        self.earlier_joules = [0.0] * world_size()  # energy of each rank's GPU in the steady steps of earlier runs
        self.started: float | None = None
        self.begun = clock()

    def counts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of these counts. Collective."""
        return {
            "seconds": self.trainer.earlier_seconds + clock() - self.begun,
            "steady_steps": self.steps,
            "steady_seconds": self.seconds,
            "tokens": self.gather_tokens(),
            # JSON has no NaN
            "steady_joules": [None if math.isnan(joules) else joules for joules in self.gather_joules()],
        }

    def resume_counts(self, saved: dict[str, Any]) -> None:
        """Continue the counts of a checkpoint."""
        self.steps = saved["steady_steps"]
        self.seconds = saved["steady_seconds"]
        self.earlier_tokens = torch.tensor(saved["tokens"])
        if self.steps:
            joules = [math.nan if each is None else each for each in saved["steady_joules"]]
            self.earlier_joules = joules if len(joules) == world_size() else [math.nan] * world_size()

    def begin_step(self) -> None:
        step = self.trainer.state.global_step
        if self.started is None and step >= self.first_step:
            self.started = clock()
            if self.warm_up_seconds is None:
                self.warm_up_seconds = self.started - self.begun
            self.steps_at_start = step
            self.tokens_at_start = self.all_tokens
            self.joules_at_start = self.energy.joules()

    def end_step(self) -> None:
        # The Trainer counts the tokens of a step before the step begins
        self.all_tokens = self.trainer.tokens

    def pause(self) -> None:
        """Exclude the time until the next step: an evaluation or a save follows."""
        if self.started is not None:
            self.seconds += clock() - self.started
            self.steps += self.trainer.state.global_step - self.steps_at_start
            self.tokens = self.tokens + self.all_tokens - self.tokens_at_start
            self.joules += self.energy.joules() - self.joules_at_start
            self.started = None

    def gather_tokens(self) -> list[list[int]]:
        """Return the token counts of all ranks, including earlier runs: all steps, and the steady steps. Collective."""
        ranks = gather_lists([self.all_tokens.tolist(), self.tokens.tolist()])
        group_size = self.trainer.get_tp_size()  # all ranks of a tensor group count the same tokens
        return (torch.tensor(ranks).sum(0) // group_size + self.earlier_tokens).tolist()

    def gather_joules(self) -> list[float]:
        """Return the joules of each rank's GPU in the steady steps, including earlier runs. Collective."""
        ranks = [joules for (joules,) in gather_lists([self.joules])]
        return [own + earlier for own, earlier in zip(ranks, self.earlier_joules, strict=True)]

    @property
    def samples_per_step(self) -> float:
        """Mean number of questions, because the last step of an epoch may have fewer."""
        return len(self.trainer.train_dataset) / self.trainer.steps_per_epoch

    def record_energy(self, record: RunRecord) -> None:
        """Record the energy of the steady steps. Collective."""
        if self.energy.reason:
            record.missing("energy", self.energy.reason)
            return
        joules = self.gather_joules()
        _, (steady_real, *_) = self.gather_tokens()
        energy = {}
        if not self.steps:
            record.reasons["energy.steady_joules"] = TOO_FEW_STEPS
        elif math.isnan(sum(joules)):
            reason = "the checkpoint has no energy of these GPUs, or NVML's counter failed or went back"
            record.reasons["energy.steady_joules"] = reason
        else:
            total = sum(joules)
            energy = {
                "steady_joules": [round(each, 1) for each in joules],
                "steady_joules_sum": round(total, 1),
                "joules_per_question": round(total / (self.steps * self.samples_per_step), 4),
                "joules_per_1000_tokens": round(1000 * total / steady_real, 4),
                "mean_watts": round(total / self.seconds / len(joules), 2),
            }
        record.update(energy=energy)

    def summary(self, reasons: dict[str, str]) -> dict:
        """Return the steady rates of all ranks together, the warm-up time, token counts, and MFU. Collective.

        Add to `reasons` why a value is missing.
        """
        (real, padding, counted, _), steady = self.gather_tokens()
        steady_real, _, steady_counted, steady_squares = steady
        rate = tokens_per_second = mfu = None
        if self.warm_up_seconds is None:
            reasons["train.warm_up_seconds"] = "too few steps for a warm-up"
        if ranks_per_gpu() > 1:
            reasons |= {f"train.{name}": SHARED_GPU for name in (*RATES, *STEADY_RATES)}
        elif self.steps:
            rate = self.steps / self.seconds
            tokens_per_second = round(steady_real / self.seconds, 1)
        else:
            for name in STEADY_RATES:
                reasons.setdefault(f"train.{name}", TOO_FEW_STEPS)
        if rate and self.flops:
            needed = self.flops.count_operations(steady_real, steady_counted, steady_squares)
            mfu = round(100 * needed / (self.seconds * self.peak * world_size()), 2)
            if mfu > 100:
                mfu = None
                reason = "the steps were faster than the measured peak: the machine was busy while the run measured it"
                reasons["train.mfu_percent"] = reason
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
