"""The Trainer of all runs: the same loss under every strategy, and on behind a stop as if there had been none."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from data_loader import IGNORED
from distributed.tensor_parallel import GroupScaler
from shared.errors import WorkshopError
from training.chunked_loss import add_label_counts, computes_loss_in_head
from training.find_checkpoints import MARKER, checkpoint_folder
from training.flops import KINDS_OF_TOKENS, count_tokens
from training.sampling import GroupByLengthSampler, sampler_of
from training.save_checkpoints import Progress, full_disk_errors


class WorkshopTrainer(Trainer):
    """The Trainer with a loss that is the same under every strategy, which counts on from a checkpoint.

    Models compute their loss in fp32, as the sum over the tokens that count / their number. FSDP in 16 bit casts in two
    places. accelerate's policy for FSDP2 casts what the model returns, and so the loss: in bf16 it keeps two or three
    digits, in fp16 the loss scale of 65,536 makes it infinite. And both versions cast what goes into the model, and so
    the number of tokens, which transformers passes as a float: wrong by up to 0.4 % in bf16, infinite above 65,504 in
    fp16.
    """

    earlier_seconds = 0.0  # of training, before the checkpoint that this run goes on from
    saved_step = 0  # of the last checkpoint that is complete, 0 without one
    # told where a step is: its data, forward pass, backward pass, optimizer (--profile)
    phase: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext
    scale_of_norm = 1.0  # of the gradients that DeepSpeed tells the norm of
    loss_of_step: Any = 0  # sum over the micro batches of this optimizer step; FiniteLossCallback sets it back

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # of this rank and run, see count_tokens
        self.tokens = torch.zeros(KINDS_OF_TOKENS, dtype=torch.int64, device=self.args.device)
        # read by train(), which wraps the model
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)
        if self.get_tp_size() > 1 and self.accelerator.scaler:
            self.accelerator.scaler = GroupScaler(self.args.device.type)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps: batches of one rank over accumulation, rounded up."""
        return math.ceil(len(self.get_train_dataloader()) / self.args.gradient_accumulation_steps)

    def _get_train_sampler(self, train_dataset=None):
        sampler = super()._get_train_sampler(train_dataset)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        groups = self.args.world_size // self.get_tp_size()
        global_batch = self.args.train_batch_size * self.args.gradient_accumulation_steps * groups
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return GroupByLengthSampler(global_batch, sampler.lengths[:], seed)

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        # In fp16 the scaler skips a step that overflowed, and the learning rate waits, as with DeepSpeed. A fused
        # optimizer would be left to skip it by itself. With FSDP1 that fails: its scaler sums over the ranks what it
        # found, in a shape that the kernel refuses, and the kernel skips at a sum of 1 alone
        # (torch/distributed/fsdp/sharded_grad_scaler.py, ATen/native/cuda/fused_adam_utils.cuh)
        optimizer._step_supports_amp_scaling = False
        return optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.is_fsdp_enabled and torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.long()  # whole numbers are not cast
        with self.phase("forward"):
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.is_deepspeed_enabled and model.training:
            self.scale_of_norm = scale_for_stage_0(result, model.optimizer)
        return result

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Loss of a batch; `evaluation_loop` makes the mean of all of them from what is summed here."""
        inputs = self._prepare_inputs(inputs)
        # the last batches are filled up with questions that were there before, so that all ranks have equally many
        inputs["labels"][self.questions_left(len(inputs["labels"])) :] = IGNORED
        counted = (inputs["labels"][:, 1:] != IGNORED).sum()  # the first label is the target of no position
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        self.evaluated += torch.stack([torch.where(counted > 0, loss * counted, 0.0), counted])
        return loss, None, None

    def questions_left(self, rows: int) -> int:
        """How many of the first rows of this rank's batch are questions that no batch had before."""
        loader = self.accelerator.gradient_state
        if not loader.end_of_dataloader or loader.remainder <= 0:
            return rows
        group = self.accelerator.process_index // self.get_tp_size()
        return max(0, loader.remainder - group * rows)

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        """The loss is the mean over all tokens that count, on any number of ranks and with any batch size.

        transformers' own is a mean over batches, each of which is a mean over tokens: of all ranks' batches if there
        are several, of one rank's batch otherwise.
        """
        self.evaluated = torch.zeros(2, dtype=torch.float64, device=self.args.device)  # sum of losses, tokens
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        loss, counted = self.accelerator.reduce(self.evaluated).tolist()
        if not counted:
            what = "gives no whole batch for each rank to evaluate"
            raise WorkshopError("--eval_size", what, "raise it, or leave out --dataloader_drop_last")
        output.metrics[f"{metric_key_prefix}_loss"] = loss / counted
        return output

    def go_on_from(self, progress: Progress) -> None:
        """Count on from what a checkpoint tells of itself. To be called when the training begins."""
        self._tr_loss += progress.unlogged_loss
        self._total_loss_scalar = progress.logged_loss
        self._globalstep_last_logged = progress.last_logged_step
        self._initial_global_step = 0
        self.earlier_seconds = progress.seconds

    def get_batch_samples(self, *args, **kwargs):
        with self.phase("data"):
            batches, labels_in_step = super().get_batch_samples(*args, **kwargs)
            if batches and computes_loss_in_head(self.model):
                add_label_counts(batches)
        return batches, labels_in_step

    def _clip_grad_norm(self, model):
        with self.phase("optimizer"):
            self.unscale_cut_gradients(model)
            return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model, grad_norm=None):
        if grad_norm is None:  # nothing was clipped: --max_grad_norm 0
            self.unscale_cut_gradients(model)
        norm = super()._get_grad_norm(model, grad_norm)
        return norm if self.scale_of_norm == 1 else norm / self.scale_of_norm

    def unscale_cut_gradients(self, model) -> None:
        """Those of tensor parallelism: transformers 5.23 sums their norm without dividing by the loss scale before."""
        if self._has_mixed_mesh_grads(model):
            self.accelerator.unscale_gradients()

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.tokens = self.tokens + count_tokens(inputs)
        with self.phase("backward"):  # and in it the forward pass
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.loss_of_step = self.loss_of_step + loss
        # A loss that is not finite counts as the mean of those before, as with logging_nan_inf_filter, which asks in
        # Python: nothing of the next micro batch would be given to the GPU before it has done this one
        mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, mean)

    def _run_epoch(self, *, epoch, train_dataloader, **kwargs):
        # transformers would do one step more than --max_steps from a checkpoint of the last one, or behind a stop
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            self.control.should_training_stop = True
            return
        # On several ranks, accelerate does not find the sampler to set its epoch when a resumed run skips batches
        sampler = sampler_of(train_dataloader)
        if isinstance(sampler, GroupByLengthSampler):
            sampler.epoch = epoch
        super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint):
        # Under FSDP2 the loading begins with a step over gradients of zero. accelerate's optimizer would hand it to the
        # loss scaler of fp16, which refuses: it has scaled nothing yet
        prepared = self.optimizer
        if self.is_fsdp_enabled:
            self.optimizer = prepared.optimizer
        super()._load_optimizer_and_scheduler(checkpoint)
        self.optimizer = prepared

    def _finalize_training(self, trial, num_train_samples, start_time):
        return super()._finalize_training(trial, num_train_samples, start_time - self.earlier_seconds)

    def _save_checkpoint(self, model, trial):
        folder = checkpoint_folder(self.args.output_dir, self.state.global_step)
        with full_disk_errors(folder):
            if self.is_world_process_zero():
                (folder / MARKER).unlink(missing_ok=True)  # of a run that was resumed before this step
            super()._save_checkpoint(model, trial)

    def save_here(self) -> Path:
        """A checkpoint of the last step, if there is none yet. Collective."""
        if self.saved_step != self.state.global_step:
            self._save_checkpoint(self.model, None)
            self.callback_handler.on_save(self.args, self.state, self.control)
        return checkpoint_folder(self.args.output_dir, self.state.global_step)


def scale_for_stage_0(loss: torch.Tensor, optimizer: Any) -> float:
    """Multiply the gradient of the loss by the loss scale, where DeepSpeed divides by it and has not multiplied.

    DeepSpeed 0.19.8 scales an fp16 loss for a ZeROOptimizer alone (runtime/engine.py, backward). The optimizers of
    stage 0 divide the gradients by the scale all the same. Those are then 65,536 times too small, Adam's epsilon is
    larger, and the model barely learns (deepspeedai/DeepSpeed#8393). A gradient above 1 has been scaled: by a DeepSpeed
    in which this is mended.

    Returns by what the norm of the gradients must be divided: FP16_UnfusedOptimizer, which steps PyTorch's AdamW, tells
    that of the scaled ones.
    """
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if not isinstance(optimizer, FP16_Optimizer | FP16_UnfusedOptimizer):
        return 1.0
    scale = optimizer.loss_scale_config.cur_scale
    loss.register_hook(lambda gradient: torch.where(gradient > 1, gradient, gradient * scale))
    return scale if isinstance(optimizer, FP16_UnfusedOptimizer) else 1.0
