"""What is done beside the steps of a training: all callbacks, in their order, and those that watch it."""

import math
import statistics
import sys
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import ProgressCallback, TrainerCallback

from distributed import watchdog
from distributed.collectives import gather_lists, print_once
from shared.errors import WorkshopError
from training.audit import AuditCallback
from training.checkpoints import CheckpointCallback
from training.model_state_bytes import HeldCallback
from training.profiling import ProfileCallback
from training.speed import TrainSpeedCallback
from training.stopping import StopCallback

PERCENT_PER_LINE = 5
BAD_LOSSES = 3  # in a row


def add_callbacks(trainer, options, record, stop, identity, checkpoint, flops, peak) -> None:
    """What is done beside the steps, in this order at each event, behind transformers' own callbacks, which decide when
    to log, evaluate and save."""
    speed = TrainSpeedCallback(trainer, flops, peak, options.values["profile"])
    stopping = [StopCallback(stop, trainer)]
    if options.values["tensor_parallel"] > 1:
        print_once("--tensor_parallel writes no checkpoints: a stop ends this run at once, and it is lost")
        stopping = []
    utilisation = UtilisationCallback()
    held = HeldCallback(trainer)
    callbacks = [
        speed,  # its clock stops before the others work
        utilisation,
        held,
        AuditCallback(trainer, options, record),  # ends a run that is not what was asked for
        RecordCallback(trainer, record, speed, utilisation, held),  # at the end: losses, rates, peaks of memory
        CheckpointCallback(trainer, identity, speed, checkpoint),  # marks what was saved as complete
        *stopping,  # and only then the run may end
        FiniteLossCallback(trainer),  # ends a run whose loss is no number, at the end of a step, before it is saved
        WatchdogCallback(),  # tells the watchdog what comes next
    ]
    if options.values["profile"]:
        callbacks.append(ProfileCallback(trainer, record))
    for callback in callbacks:
        trainer.add_callback(callback)
    if not sys.stderr.isatty() and not trainer.args.disable_tqdm:  # lines instead of bars, in a log
        trainer.pop_callback(ProgressCallback)
        trainer.add_callback(LogLinesCallback())


class UtilisationCallback(TrainerCallback):
    """Utilisation and memory of each rank's GPU, or of its process where there is none, sampled after each step."""

    def __init__(self):
        self.samples = []
        self.reason = ""

    def on_train_begin(self, args, state, control, **kwargs):
        self.process = psutil.Process()
        self.process.cpu_percent()  # the first call only starts the measurement

    def on_step_end(self, args, state, control, **kwargs):
        self.samples.append(self.gpu_sample() if torch.cuda.is_available() else self.process_sample())

    def gpu_sample(self) -> dict:
        try:
            utilisation = torch.cuda.utilization()
        except Exception as error:  # no nvidia-ml-py, or a GPU partition that does not tell
            utilisation = None
            self.reason = str(error)
        return {
            "gpu_util_%": utilisation,
            "mem_alloc_MB": torch.cuda.memory_allocated() / 2**20,
            "mem_reserved_MB": torch.cuda.memory_reserved() / 2**20,
            "mem_total_MB": torch.cuda.get_device_properties().total_memory / 2**20,
        }

    def process_sample(self) -> dict:
        return {"cpu_util_%": self.process.cpu_percent(), "process_mem_MB": self.process.memory_info().rss / 2**20}

    def means(self) -> dict:
        """avg_<name> of every quantity and std_<name> of the utilisation, means over the ranks. Collective."""
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
    """The Trainer's log lines, and one of progress every few percent, for a log in which no bar can be drawn."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = time.monotonic()
        self.shown = 100 * state.global_step // state.max_steps

    def on_step_end(self, args, state, control, **kwargs):
        percent = 100 * state.global_step // state.max_steps
        if state.is_world_process_zero and percent >= self.shown + PERCENT_PER_LINE:
            self.shown = percent
            seconds = time.monotonic() - self.started
            print(f"step {state.global_step} of {state.max_steps} ({percent} %) after {seconds:.0f} s", flush=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in logs.items()}
            shown.pop("total_flos", None)
            print(shown, flush=True)


class RecordCallback(TrainerCallback):
    """Keeps the run record up to date, so that a killed run loses nothing that was measured."""

    def __init__(
        self,
        trainer: Any,
        record: Any,
        speed: TrainSpeedCallback,
        utilisation: UtilisationCallback,
        held: HeldCallback,
    ):
        self.trainer = trainer
        self.record = record
        self.speed = speed
        self.utilisation = utilisation
        self.held = held

    def on_step_end(self, args, state, control, **kwargs):
        # What was not logged by the end counts in the Trainer's train_loss as rank 0 has it, not as the mean of all
        if state.global_step >= state.max_steps:
            control.should_log = True
        return control

    def on_train_begin(self, args, state, control, **kwargs):
        if args.deepspeed:
            configs = self.record.content["configs"]
            self.record.update(configs=configs | {"deepspeed": args.hf_deepspeed_config.config})
        if state.global_step:  # those before the checkpoint
            self.record.update(eval=evaluations(state.log_history))

    def on_evaluate(self, args, state, control, **kwargs):
        self.record.update(eval=evaluations(state.log_history))

    def on_train_end(self, args, state, control, **kwargs):
        metrics = state.log_history[-1]  # train_loss, train_runtime ...
        self.record.training(self.trainer, metrics, self.speed, self.utilisation, self.held)


class WatchdogCallback(TrainerCallback):
    """Tells the watchdog that the training goes on. The last of the callbacks, so that it tells what comes next."""

    def on_step_begin(self, args, state, control, **kwargs):
        watchdog.progress(f"step {state.global_step + 1}")

    def on_step_end(self, args, state, control, **kwargs):
        watchdog.progress(f"the end of step {state.global_step}")

    def on_prediction_step(self, args, state, control, **kwargs):
        watchdog.progress(f"the evaluation after step {state.global_step}")

    def on_save(self, args, state, control, **kwargs):
        watchdog.progress(f"the end of saving step {state.global_step}")


class FiniteLossCallback(TrainerCallback):
    """Ends the run, with exit code 1, once the loss was NaN or infinite for `BAD_LOSSES` steps in a row, or in an
    evaluation.

    The Trainer logs the mean of the other losses in its place (WorkshopTrainer.training_step), and goes on to the end.
    Steps that loss scaling skips do not count: there the scaled gradients overflow, not the loss.
    """

    def __init__(self, trainer: Any):
        """trainer: a WorkshopTrainer, which sums the loss of a step."""
        self.trainer = trainer
        self.bad_losses = torch.zeros((), device=trainer.args.device, dtype=torch.int64)
        self.way_out = "lower --learning_rate"
        if trainer.args.fp16:
            self.way_out += ", or use --bf16 instead of --fp16"

    def on_step_end(self, args, state, control, **kwargs):
        self.bad_losses = torch.where(self.trainer.loss_of_step.isfinite(), 0, self.bad_losses + 1)
        self.trainer.loss_of_step = 0
        # to look at the number means to wait for the GPU: only when the Trainer does so as well
        if control.should_log or control.should_evaluate or control.should_save:
            self.check(state.global_step)

    def on_epoch_end(self, args, state, control, **kwargs):
        self.check(state.global_step)

    def check(self, step: int) -> None:
        """Raise WorkshopError when any rank's loss was bad that often. Collective."""
        most = self.bad_losses.clone()
        if dist.is_initialized():
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        bad = int(most)
        if bad >= BAD_LOSSES:
            what = f"is not finite since step {step - bad + 1} ({bad} steps in a row)"
            raise WorkshopError("loss", what, self.way_out, code=1)

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        loss = metrics.get("eval_loss", 0.0)
        if not math.isfinite(loss):
            raise WorkshopError("evaluation loss", f"is {loss} after step {state.global_step}", self.way_out, code=1)


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
