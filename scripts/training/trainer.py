"""The Trainer of all runs, which can be interrupted and goes on as if it had not been, and its form for FSDP."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import Trainer

from errors import ENVIRONMENT, WorkshopError
from training.checkpoints import MARKER, Progress, checkpoint_folder
from training.flops import count_tokens
from training.stopping import EvaluationInterrupted


class ResumableTrainer(Trainer):
    """A Trainer that counts its loss, steps and time on from a checkpoint, and saves where a stop asks for it."""

    earlier_seconds = 0.0  # of training, before the checkpoint that this run goes on from
    saved_step = 0  # of the last checkpoint that is complete, 0 without one
    tokens: Any = 0  # of this rank and run: a tensor of count_tokens, once there was a batch

    def go_on_from(self, progress: Progress) -> None:
        """Count on from what a checkpoint tells of itself. To be called when the training begins."""
        self._tr_loss += progress.unlogged_loss
        self._total_loss_scalar = progress.logged_loss
        self._globalstep_last_logged = progress.last_logged_step
        self._initial_global_step = 0
        self.earlier_seconds = progress.seconds
        if self.is_deepspeed_enabled:
            repeat_steps(self.deepspeed)

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.tokens = self.tokens + count_tokens(inputs)
        return super().training_step(model, inputs, num_items_in_batch)

    def _run_epoch(self, *args, **kwargs):
        # transformers would do one step more than --max_steps from a checkpoint of the last one, or behind a stop
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, trial, num_train_samples, start_time):
        return super()._finalize_training(trial, num_train_samples, start_time - self.earlier_seconds)

    def evaluate(self, *args, **kwargs):
        """Also leaves the random numbers as they were: whether it comes before or after a stop changes nothing."""
        try:
            with torch.random.fork_rng(devices=[]):
                return super().evaluate(*args, **kwargs)
        except EvaluationInterrupted:
            self.control.should_evaluate = False
            self.control.should_save = self.saved_step != self.state.global_step
            self.control.should_training_stop = True
            return {}

    def _save_checkpoint(self, model, trial):
        folder = checkpoint_folder(self.args.output_dir, self.state.global_step)
        with saving(folder):
            if self.is_world_process_zero():
                (folder / MARKER).unlink(missing_ok=True)  # of a run that was resumed before this step
            super()._save_checkpoint(model, trial)

    def save_here(self) -> None:
        """A checkpoint of the last step, if there is none yet. Collective."""
        if self.saved_step != self.state.global_step:
            self._save_checkpoint(self.model, None)
            self.callback_handler.on_save(self.args, self.state, self.control)


def repeat_steps(engine: Any) -> None:
    """Make DeepSpeed's Adam on the CPU go on from its checkpoint to the last bit; a second per 100,000 steps.

    Its C++ code multiplies the powers of the betas on from step to step, and no checkpoint holds them: in the first
    step behind one it takes std::pow, which rounds otherwise behind most steps. Steps without weights, from the first
    on, multiply as the run before did.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    optimizer = engine.basic_optimizer
    # FusedAdam is the same code on the CPU; that for GPUs takes std::pow in each step
    on_cpu = all(weight.device.type == "cpu" for weight in optimizer.state)
    if not on_cpu or not isinstance(optimizer, DeepSpeedCPUAdam | FusedAdam):
        return
    steps = max((state["step"] for state in optimizer.state.values()), default=0)
    nothing = torch.nn.Parameter(torch.empty(0))
    nothing.grad = torch.empty(0)
    groups = optimizer.param_groups
    optimizer.param_groups = [groups[0] | {"params": [nothing], "step": 0}]
    for _ in range(steps):
        optimizer.step()
    optimizer.param_groups = groups
    optimizer.state.pop(nothing, None)  # not there if fp16 has skipped all steps so far


@contextlib.contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Turns what the libraries raise when a disk is full into one line. Raises WorkshopError (exit code 3)."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        disk = isinstance(error, OSError | SafetensorError) or "PytorchStreamWriter" in str(error)
        if not disk and "inline_container" not in str(error):
            raise
        way_out = "free disk space or quota, then --resume_from_checkpoint goes on from the last complete checkpoint"
        raise WorkshopError(folder, f"is not complete, writing failed ({reason})", way_out, ENVIRONMENT) from error


class FSDPTrainer(ResumableTrainer):
    """The Trainer, with a loss in fp32 when FSDP computes in 16 bit: as with DDP and ZeRO.

    Models compute their loss in fp32, as the sum over the tokens that count / their number. FSDP casts in two places.
    accelerate's policy for FSDP2 casts what the model returns, and so the loss: in bf16 it keeps two or three digits,
    in fp16 the loss scale of 65,536 makes it infinite. And both versions cast what goes into the model, and so the
    number of tokens, which transformers passes as a float: wrong by up to 0.4 % in bf16, infinite above 65,504 in fp16.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # read by train(), which wraps the model; without one it is not FSDP that will run, as the audit tells
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.long()  # whole numbers are not cast
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
