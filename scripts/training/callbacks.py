"""All callbacks of a training run in their order, and the callbacks that are too small for their own file."""

import math
import sys
import time
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from distributed import watchdog
from distributed.collectives import print_once
from guard.audit import AuditCallback
from guard.checkpoints import CheckpointCallback
from guard.run_frame import Run
from guard.stopping import StopCallback
from measure.gpu_activity import GpuActivityMeter
from measure.measured_memory import model_state_bytes, record_model_state, record_peaks
from measure.profiling import ProfileCallback
from measure.speed import TrainSpeed
from measure.utilisation import Utilisation
from records.schema import local_now
from training.trainer import WorkshopTrainer

PERCENT_PER_LINE = 5


def add_callbacks(run: Run, trainer: WorkshopTrainer) -> None:
    """Add the callbacks of this workshop to the Trainer.

    At each event they are called in this order, after transformers' own callbacks, which decide when to log, evaluate
    and save.
    """
    stopping = [StopCallback(run.stop, trainer)]
    if not run.strategy.saves_checkpoints:
        print_once("--tensor_parallel writes no checkpoints: a stop ends this run at once, and nothing is saved")
        stopping = []
    callbacks = [
        CheckpointCallback(trainer, run.identity),  # marks a saved checkpoint as complete
        MeasureCallback(run, trainer),  # its clock stops before the next callbacks work
        AuditCallback(trainer, run.settings, run.record),  # ends a run whose values differ from the requested ones
        *stopping,  # may end the run, so they come after the checkpoint is marked
        DropoutCallback(trainer),  # gives each rank its own random numbers
        WatchdogCallback(),  # reports the next phase to the watchdog
    ]
    if run.settings.data.profile:
        callbacks.append(ProfileCallback(trainer, run.record))
    for callback in callbacks:
        trainer.add_callback(callback)
    if not sys.stderr.isatty() and not trainer.args.disable_tqdm:  # a log file gets lines instead of bars
        trainer.pop_callback(ProgressCallback)
        trainer.add_callback(LogLinesCallback())


class LogLinesCallback(PrinterCallback):
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
        if state.is_world_process_zero:  # PrinterCallback itself prints once per node
            super().on_log(args, state, control, logs)


class MeasureCallback(TrainerCallback):
    """Callback that measures the training, and keeps the run record up to date for the case that the run is killed."""

    def __init__(self, run: Run, trainer: WorkshopTrainer):
        self.run = run
        self.record = run.record
        self.trainer = trainer
        self.model_state: dict[str, int | None] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        run = self.run
        self.first_step = state.global_step  # 0 without a checkpoint
        self.speed = TrainSpeed(self.trainer, run.energy, run.flops, run.peak, run.settings.data.profile)
        self.gpu_activity = GpuActivityMeter(self.speed)
        self.utilisation = Utilisation(self.record)
        self.trainer.keep_counts(self.speed)
        if self.first_step:
            self.record.update(eval=evaluations(state.log_history))
        if args.deepspeed:
            in_effect: Any = args.hf_deepspeed_config
            self.record.update(configs=self.record.content["configs"] | {"deepspeed": in_effect.config})
        self.paused = local_now()  # an evaluation or a save may follow this event and the next ones

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.speed.begin_step()
        self.gpu_activity.begin_step()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.count_model_state(has_gradients=True)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.count_model_state(has_gradients=not args.deepspeed)

    def count_model_state(self, has_gradients: bool) -> None:
        """Count the bytes of parameters, gradients and optimizer state once, in the second step.

        Between two backward passes of this step, gradients are accumulated, and the optimizer has its state. Without
        accumulation, count right before the second optimizer step, when DeepSpeed has already freed its gradients.
        """
        if self.trainer.state.global_step > self.first_step and self.model_state is None:
            self.model_state = model_state_bytes(self.trainer, has_gradients)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.speed.end_step()
        self.trainer.end_step()
        if control.should_evaluate or control.should_save:
            self.speed.pause()
        self.utilisation.sample()
        self.gpu_activity.end_step()
        # Log at the last step. Otherwise the unlogged steps count in train_loss with rank 0's loss, not with the mean
        if state.global_step >= state.max_steps:
            control.should_log = True
        self.paused = local_now()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.speed.pause()
        self.gpu_activity.pause()
        self.paused = local_now()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.record.update(eval=evaluations(state.log_history))
        self.record.add_pause("evaluation", self.paused)
        self.paused = local_now()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.record.add_pause("saving", self.paused)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record all measurements. Collective."""
        self.paused = local_now()
        record_peaks(self.record)
        record_model_state(self.model_state, self.record)
        self.gpu_activity.write(self.record)
        self.speed.record_energy(self.record)
        rates = self.speed.summary(self.record.reasons)
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
                "samples_per_second": of_trainer.get("train_samples_per_second"),
                "steps_per_second": of_trainer.get("train_steps_per_second"),
                **rates,
            },
            callbacks=self.utilisation.means()
            | {
                "train/steps_per_second_mean": rates["steady_steps_per_second"],
                "train/samples_per_second_mean": rates["steady_samples_per_second"],
            },
        )


class DropoutCallback(TrainerCallback):
    """Callback that gives each rank random numbers of its own. Otherwise all ranks have the same dropout masks.

    The ranks of a tensor-parallel group process the same questions, so they share the numbers. The first group keeps
    the numbers of a run on one rank. The order of the questions is taken from the common seed before this event, and a
    run that resumes loads its saved random states after it.
    """

    def __init__(self, trainer: WorkshopTrainer):
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if group := args.process_index // self.trainer.get_tp_size():
            set_seed((args.seed + group) % 2**32)


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


def evaluations(log_history: list[dict]) -> list[dict]:
    """Return one entry per evaluation from the Trainer's log."""
    return [
        {
            "epoch": entry["epoch"],
            "step": entry["step"],
            "loss": entry["eval_loss"],
            "runtime_s": entry["eval_runtime"],
            "samples_per_second": entry.get("eval_samples_per_second"),
        }
        for entry in log_history
        if "eval_loss" in entry
    ]
