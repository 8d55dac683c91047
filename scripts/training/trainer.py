"""The Trainer used by all runs. It computes the same losses under every strategy and resumes exactly after a stop."""

import math
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from config import IGNORED
from distributed.collectives import gather_lists, max_over_ranks, rank, ranks_per_gpu, world_size
from guard.checkpoints import checkpoint_folder, full_disk_errors
from guard.silent_faults import check_weights, explain_loss
from measure.flops import KINDS_OF_TOKENS, count_tokens
from measure.speed import TrainSpeed
from models.chunked_loss import add_label_counts, computes_loss_in_head
from shared.errors import WorkshopError
from shared.paths import CHECKPOINT_MARKER
from training.upstream_fixes import UpstreamFixes

# Key of the counts in a checkpoint's trainer_state.json, under which version 2.0.0 wrote them, too
COUNTS = "MeasureCallback"
BAD_LOSSES = 3  # successive steps in fp16 whose loss is not finite


class WorkshopTrainer(UpstreamFixes):
    """Trainer whose loss is the same under every strategy, and which continues all counts when it resumes.

    Models compute their loss in fp32: the sum over the tokens that count, divided by the number of these tokens.
    """

    def __init__(self, *, tokenizer: Any, **kwargs: Any) -> None:
        """tokenizer: shows the question whose loss is not finite."""
        super().__init__(**kwargs)
        self.tokenizer = tokenizer
        self.earlier_seconds = 0.0  # training time before the checkpoint that this run resumes from
        self.saved_step = 0  # step of the last checkpoint, 0 without one
        # Token counts of this rank in this run, see count_tokens
        self.tokens = torch.zeros(KINDS_OF_TOKENS, dtype=torch.int64, device=self.args.device)
        # Sum of this rank's losses that are NaN or infinite since the last log line, and number of such steps
        self.unlogged_not_finite = torch.zeros((), device=self.args.device)
        self.bad_steps = torch.zeros((), device=self.args.device)
        self.bad_losses = 0  # successive steps whose loss is not finite

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps: batches of one rank divided by accumulation, rounded up."""
        return math.ceil(len(self.get_train_dataloader()) / self.args.gradient_accumulation_steps)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None, None]:
        """Compute the loss of a batch, and add it to the sums of `evaluation_loop`."""
        inputs = self.mask_repeated_rows(self._prepare_inputs(inputs))
        counted = (inputs["labels"][:, 1:] != IGNORED).sum()  # the first label is the target of no position
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        self.evaluated += torch.stack([torch.where(counted > 0, loss * counted, 0.0), counted])
        return loss, None, None

    def mask_repeated_rows(self, inputs: Any) -> Any:
        """Do not count the labels of questions that accelerate repeats to fill the last batch of each rank."""
        loader: Any = self.accelerator.gradient_state
        own, groups = (number // self.get_tp_size() for number in (self.args.process_index, self.args.world_size))
        repeats = self.accelerator.even_batches and not self.args.dataloader_drop_last and groups > 1
        if not (repeats and loader.end_of_dataloader):
            return inputs
        labels, rows = inputs["labels"], len(inputs.get("rows", inputs["labels"]))
        # accelerate's own `remainder` is missing in an epoch in which a run has resumed
        remainder = len(loader.active_dataloader.dataset) % (groups * rows) or groups * rows
        unrepeated = max(0, remainder - own * rows)  # they come first
        if "rows" in inputs:  # one row of several questions
            labels.masked_fill_(inputs["places"] >= unrepeated * inputs["rows"].shape[1], IGNORED)
        else:
            labels[unrepeated:] = IGNORED
        return inputs

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate. The loss is the mean over all tokens that count, for any number of ranks and any batch size.

        transformers computes the mean loss of each batch, over its tokens on all ranks, and then the mean of these
        means. So its loss depends on the number of ranks and the batch size.
        """
        self.evaluated = torch.zeros(2, dtype=torch.float64, device=self.args.device)  # sum of losses, number of tokens
        output: Any = super().evaluation_loop(*args, **kwargs)
        loss, counted = self.accelerator.reduce(self.evaluated).tolist()
        if not counted:
            what = "is too small to give each rank a whole batch"
            raise WorkshopError("--eval_size", what, "raise it, or leave out --dataloader_drop_last")
        if not math.isfinite(loss):
            what = f"is {loss} after step {self.state.global_step}"
            raise WorkshopError("evaluation loss", what, "lower --learning_rate", code=1)
        output.metrics[f"{kwargs['metric_key_prefix']}_loss"] = loss / counted
        output.metrics[f"{kwargs['metric_key_prefix']}_perplexity"] = math.exp(min(loss / counted, 700))
        return output

    def keep_counts(self, speed: TrainSpeed) -> None:
        """Write the counts of `speed` and of the losses into each checkpoint, and continue those of a resumed run.

        Call this when the training begins.
        """
        self.speed = speed
        if self.state.global_step:
            saved: Any = self.state.stateful_callbacks
            self.saved_step = self.state.global_step
            self.resume_counts(saved[COUNTS])
            speed.resume_counts(saved[COUNTS])

    def counts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the losses. Collective."""
        sums = self._tr_loss, self.unlogged_not_finite, self.bad_steps
        return {
            "logged_loss": self._total_loss_scalar,
            "last_logged_step": self._globalstep_last_logged,
            "unlogged": gather_lists([float(each) for each in sums]),  # one list per rank
        }

    def resume_counts(self, saved: dict[str, Any]) -> None:
        """Continue the losses of a checkpoint."""
        ranks = saved["unlogged"]
        # On another number of ranks, each rank gets the mean. This is correct because the Trainer logs the mean
        means = [sum(each) / len(ranks) for each in zip(*ranks, strict=True)]
        own = ranks[rank()] if len(ranks) == world_size() else means
        unlogged_loss, self.unlogged_not_finite, self.bad_steps = self._tr_loss.new_tensor(own)
        self._tr_loss += unlogged_loss
        self._total_loss_scalar = saved["logged_loss"]
        self._globalstep_last_logged = saved["last_logged_step"]
        self._initial_global_step = 0
        self.earlier_seconds = saved["seconds"]

    def get_batch_samples(self, epoch_iterator: Iterator, *args: Any, **kwargs: Any) -> tuple[list, Any]:
        """Return the micro batches of the next optimizer step, and the number of labels in them."""
        self.loss_before_step = self._tr_loss.clone()
        self.loss_of_step = torch.zeros((), device=self.args.device)
        # Without labels, a model that computes a mean loss of its own would return NaN
        masked = map(self.mask_repeated_rows, epoch_iterator) if self.model_accepts_loss_kwargs else epoch_iterator
        self.batches, labels_in_step = super().get_batch_samples(masked, *args, **kwargs)
        self.tokens = self.tokens + sum(map(count_tokens, self.batches))
        if self.batches and computes_loss_in_head(self.model):
            add_label_counts(self.batches)
        return self.batches, labels_in_step

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of a micro batch. After the last one of a step, end the run if a loss is not finite."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if model.training:
            self.loss_of_step = self.loss_of_step + loss.detach()
            if self.accelerator.sync_gradients:
                self.check_loss(partial(super().compute_loss, model, num_items_in_batch=num_items_in_batch))
        return loss

    def check_loss(self, compute: Callable[[Any], torch.Tensor]) -> None:
        """Raise WorkshopError (exit code 1) if a rank's loss is not finite, in fp16 in BAD_LOSSES steps in a row.

        In fp16, such a step is skipped, and the loss scale falls. Otherwise the next backward pass would spoil the
        weights of all ranks. Collective. compute: computes the loss of a micro batch again.
        """
        bad = max_over_ranks(int(~self.loss_of_step.isfinite()))
        self.bad_losses = self.bad_losses + 1 if bad else 0
        if self.bad_losses < (BAD_LOSSES if self.args.fp16 else 1):
            return
        losses = (compute(self._prepare_inputs(batch)) for batch in self.batches)
        try:
            where = explain_loss(
                self.model, losses, lambda number: self.tokenizer.decode(self.batches[number]["input_ids"][0])
            )
        except torch.OutOfMemoryError:
            where = "there is no memory for a second forward pass, which would show the module"
        steps = f" ({BAD_LOSSES} steps in a row)" if self.args.fp16 else ""
        remedy = "look at these questions, or lower --learning_rate"
        remedy += ", or use --bf16 instead of --fp16" if self.args.fp16 else ""
        raise WorkshopError(
            "loss", f"is not finite in step {self.state.global_step + 1}{steps}: {where}", remedy, code=1
        )

    def end_step(self) -> None:
        """Take a loss that is not finite out of the Trainer's sum, which would be NaN for the rest of the run."""
        finite = self._tr_loss.isfinite()
        self.unlogged_not_finite = self.unlogged_not_finite + torch.where(finite, 0, self._tr_loss)
        self._tr_loss = torch.where(finite, self._tr_loss, self.loss_before_step)
        self.bad_steps = self.bad_steps + ~finite

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log NaN or infinity if a loss since the last line was not finite, and the mean over the finite losses.

        Leave out the speed of ranks that share a GPU, because it says nothing about several GPUs.
        """
        if "loss" in logs:
            logs["loss"] += float(self.accelerator.reduce(self.unlogged_not_finite))
            self.unlogged_not_finite = torch.zeros_like(self.unlogged_not_finite)
        if "train_loss" in logs:
            finite_steps = self.state.global_step - float(self.accelerator.reduce(self.bad_steps, "mean"))
            logs["train_loss"] *= self.state.global_step / finite_steps if finite_steps else math.nan
        if ranks_per_gpu() > 1:
            logs = {name: value for name, value in logs.items() if not name.endswith("_per_second")}
        super().log(logs, start_time)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput:
        return super()._finalize_training(trial, num_train_samples, start_time - self.earlier_seconds)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        check_weights(self.model, self.state.global_step)
        counts: Any = self.state.stateful_callbacks  # the Trainer writes this mapping into trainer_state.json
        counts[COUNTS] = self.counts() | self.speed.counts()
        folder = checkpoint_folder(self.args.output_dir, self.state.global_step)
        with full_disk_errors(folder):
            if self.is_world_process_zero():
                # The marker exists if this step was saved before, and the run was then resumed from a lower step
                (folder / CHECKPOINT_MARKER).unlink(missing_ok=True)
            super()._save_checkpoint(model, trial)
        self.saved_step = self.state.global_step

    def save_current_step(self) -> Path:
        """Save a checkpoint of the current step, unless it exists already, and return its folder. Collective."""
        if self.saved_step != self.state.global_step:
            self._save_checkpoint(self.model, None)
            self.callback_handler.on_save(self.args, self.state, self.control)
        return checkpoint_folder(self.args.output_dir, self.state.global_step)
