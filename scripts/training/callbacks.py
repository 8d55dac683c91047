"""All callbacks of a training run in their order, and the callbacks that are too small for their own file."""

import math
import statistics
import sys
import time
from typing import Any

import psutil
import torch
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distributed import watchdog
from distributed.collectives import gather_lists, max_over_ranks, print_once
from records.schema import local_now
from records.writer import RunRecord
from shared.errors import WorkshopError
from training.audit import AuditCallback
from training.checkpoints import CheckpointCallback
from training.gpu_activity import GpuActivityCallback
from training.measured_memory import ModelStateCallback, record_peaks
from training.profiling import ProfileCallback
from training.run_frame import Run
from training.speed import TrainSpeedCallback
from training.stopping import StopCallback
from training.trainer import WorkshopTrainer

PERCENT_PER_LINE = 5
BAD_LOSSES = 3  # successive steps whose loss is not finite


def add_callbacks(run: Run, trainer: WorkshopTrainer) -> None:
    """Add the callbacks of this workshop to the Trainer.

    At each event they are called in this order, after transformers' own callbacks, which decide when to log, evaluate
    and save.
    """
    speed = TrainSpeedCallback(trainer, run.energy, run.flops, run.peak, run.settings.data.profile)
    stopping = [StopCallback(run.stop, trainer)]
    if run.settings.model.tensor_parallel > 1:
        print_once("--tensor_parallel writes no checkpoints: a stop ends this run at once, and nothing is saved")
        stopping = []
    callbacks = [
        speed,  # comes first, so that its clock stops before the other callbacks work
        UtilisationCallback(run.record),
        GpuActivityCallback(run.record, speed),
        ModelStateCallback(trainer, run.record),
        AuditCallback(trainer, run.settings, run.record),  # ends a run whose values differ from the requested ones
        RecordCallback(trainer, run.record, speed),
        CheckpointCallback(trainer, run.identity, speed, run.checkpoint),  # marks a saved checkpoint as complete
        PauseCallback(run.record),  # a save ends when its checkpoint is complete
        *stopping,  # may end the run, so they come after the checkpoint is marked
        FiniteLossCallback(trainer),  # ends a run whose loss is not finite, before the step is saved
        WatchdogCallback(),  # reports the next phase to the watchdog
    ]
    if run.settings.data.profile:
        callbacks.append(ProfileCallback(trainer, run.record))
    for callback in callbacks:
        trainer.add_callback(callback)
    if not sys.stderr.isatty() and not trainer.args.disable_tqdm:  # a log file gets lines instead of bars
        trainer.pop_callback(ProgressCallback)
        trainer.add_callback(LogLinesCallback())


class UtilisationCallback(TrainerCallback):
    """Callback that samples utilisation and memory after each step.

    It samples the GPU of each rank, or the process of each rank if there is no GPU.
    """

    def __init__(self, record: RunRecord):
        self.record = record
        self.samples: list[dict[str, Any]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.process = psutil.Process()
        self.process.cpu_percent()  # the first call only starts the measurement

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.samples.append(self.gpu_sample() if torch.cuda.is_available() else self.process_sample())

    def gpu_sample(self) -> dict:
        try:
            utilisation = torch.cuda.utilization()
        except Exception as error:  # nvidia-ml-py is missing, or the GPU partition does not report its utilisation
            utilisation = None
            self.record.reasons["callbacks.avg_gpu_util_%"] = str(error)
        return {
            "gpu_util_%": utilisation,
            "mem_alloc_MB": torch.cuda.memory_allocated() / 2**20,
            "mem_reserved_MB": torch.cuda.memory_reserved() / 2**20,
            "mem_total_MB": torch.cuda.get_device_properties().total_memory / 2**20,
        }

    def process_sample(self) -> dict:
        return {"cpu_util_%": self.process.cpu_percent(), "process_mem_MB": self.process.memory_info().rss / 2**20}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.record.update(callbacks=self.means())

    def means(self) -> dict:
        """Return avg_<name> of every quantity and std_<name> of the utilisation: means over the ranks. Collective."""
        own = {}
        for name in self.samples[0] if self.samples else []:
            values = [sample[name] for sample in self.samples]
            complete = None not in values
            own[f"avg_{name}"] = statistics.fmean(values) if complete else None
            if "util" in name:
                own[f"std_{name}"] = statistics.pstdev(values) if complete else None
        ranks = [means for (means,) in gather_lists([own])]
        return {
            name: None if any(r[name] is None for r in ranks) else round(statistics.fmean(r[name] for r in ranks), 2)
            for name in own
        }


class LogLinesCallback(TrainerCallback):
    """The Trainer's log lines and a progress line every few percent, for a log file that cannot show a bar."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.started = time.monotonic()
        self.shown = 100 * state.global_step // state.max_steps

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        percent = 100 * state.global_step // state.max_steps
        if state.is_world_process_zero and percent >= self.shown + PERCENT_PER_LINE:
            self.shown = percent
            seconds = time.monotonic() - self.started
            print(f"step {state.global_step} of {state.max_steps} ({percent} %) after {seconds:.0f} s", flush=True)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and logs:
            shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in logs.items()}
            shown.pop("total_flos", None)
            print(shown, flush=True)


class RecordCallback(TrainerCallback):
    """Callback that keeps the run record up to date, so that the measurements of a killed run are kept."""

    def __init__(self, trainer: WorkshopTrainer, record: RunRecord, speed: TrainSpeedCallback):
        self.trainer = trainer
        self.record = record
        self.speed = speed

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Log at the last step. Otherwise the unlogged steps count in train_loss with rank 0's loss, not with the mean
        if state.global_step >= state.max_steps:
            control.should_log = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.deepspeed:
            in_effect: Any = args.hf_deepspeed_config
            self.record.update(configs=self.record.content["configs"] | {"deepspeed": in_effect.config})
        if state.global_step:  # a resumed run's log history includes earlier evaluations
            self.record.update(eval=evaluations(state.log_history))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.record.update(eval=evaluations(state.log_history))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record losses, rates and memory peaks. Collective."""
        record_peaks(self.record)
        measured = self.speed.summary()
        self.note_missing_rates(measured)
        self.record_steady_energy()
        of_trainer = state.log_history[-1]
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        if losses and not math.isfinite(losses[-1]):
            self.record.reasons["train.loss_last"] = f"is {losses[-1]}"
        if not math.isfinite(of_trainer["train_loss"]):
            self.record.reasons["train.loss_mean"] = "no step has a finite loss"
        self.record.update(
            train={
                "steps": state.global_step,
                "loss_mean": of_trainer["train_loss"],
                "loss_last": losses[-1] if losses else None,
                "runtime_s": of_trainer["train_runtime"],
                "samples_per_second": of_trainer["train_samples_per_second"],
                "steps_per_second": of_trainer["train_steps_per_second"],
                **measured,
            },
            callbacks=self.record.content["callbacks"]
            | {
                "train/steps_per_second_mean": measured["steady_steps_per_second"],
                "train/samples_per_second_mean": measured["steady_samples_per_second"],
            },
        )

    def record_steady_energy(self) -> None:
        """Record the energy of the steady steps. Collective."""
        if reason := self.speed.energy.reason:
            self.record.missing("energy", reason)
            return
        energy = self.speed.steady_energy()
        if not energy:
            reason = "the checkpoint has no energy of these GPUs, or NVML's counter failed or went back"
            if not self.speed.steps:
                reason = "too few steps after the warm-up"
            self.record.reasons["energy.steady_joules"] = reason
        self.record.update(energy=energy)

    def note_missing_rates(self, measured: dict) -> None:
        """Add the reason for each empty rate that has none yet. measured: the result of TrainSpeedCallback.summary."""
        reasons = self.record.reasons
        if measured["warm_up_seconds"] is None:
            reasons["train.warm_up_seconds"] = "too few steps for a warm-up"
        if not measured["steady_steps"]:
            for name in ("steady_samples_per_second", "steady_tokens_per_second", "mfu_percent"):
                reasons.setdefault(f"train.{name}", "too few steps after the warm-up")
        elif measured["mfu_percent"] is None:
            reason = "the steps were faster than the measured peak: the machine was busy while the run measured it"
            reasons.setdefault("train.mfu_percent", reason)


class PauseCallback(TrainerCallback):
    """Callback that records the time of each evaluation and each save, for the plot of the power."""

    def __init__(self, record: RunRecord):
        self.record = record

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.started = local_now()

    on_train_begin = on_epoch_end = on_train_end = on_step_end  # an evaluation or a save may follow each of them

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.record.add_pause("evaluation", self.started)
        self.started = local_now()  # a save may follow

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.record.add_pause("saving", self.started)


class WatchdogCallback(TrainerCallback):
    """Callback that reports each phase of the training to the watchdog.

    It is called last at each event, so it names the phase that comes after the other callbacks.
    """

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        watchdog.progress(f"step {state.global_step + 1}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        watchdog.progress(f"the end of step {state.global_step}")

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        watchdog.progress(f"the evaluation after step {state.global_step}")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        watchdog.progress(f"the end of saving step {state.global_step}")


class FiniteLossCallback(TrainerCallback):
    """Callback that ends the run with exit code 1 if the loss is NaN or infinite.

    This happens after `BAD_LOSSES` such steps in a row, or after one such evaluation. Steps that loss scaling skips do
    not count: in these steps the scaled gradients overflow, not the loss.
    """

    def __init__(self, trainer: WorkshopTrainer):
        self.trainer = trainer
        self.bad_losses = torch.zeros((), device=trainer.args.device, dtype=torch.int64)
        self.remedy = "lower --learning_rate"
        if trainer.args.fp16:
            self.remedy += ", or use --bf16 instead of --fp16"

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.bad_losses = torch.where(self.trainer.end_step(), 0, self.bad_losses + 1)
        # Reading the value waits for the GPU, so read it only when the Trainer waits for the GPU anyway
        if control.should_log or control.should_evaluate or control.should_save:
            self.check(state.global_step)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.check(state.global_step)

    def check(self, step: int) -> None:
        """Raise WorkshopError if any rank's loss was not finite for BAD_LOSSES steps in a row. Collective."""
        bad = max_over_ranks(int(self.bad_losses))
        if bad >= BAD_LOSSES:
            what = f"is not finite since step {step - bad + 1} ({bad} steps in a row)"
            raise WorkshopError("loss", what, self.remedy, code=1)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        loss = metrics.get("eval_loss", 0.0)
        if not math.isfinite(loss):
            raise WorkshopError("evaluation loss", f"is {loss} after step {state.global_step}", self.remedy, code=1)


def evaluations(log_history: list[dict]) -> list[dict]:
    """Return one entry per evaluation from the Trainer's log."""
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
