"""Workarounds for errors and gaps in the libraries. Participants of the workshop need not read this file.

Each class repairs one behaviour of transformers' Trainer, and UpstreamFixes combines the classes. To remove a
workaround, delete its class, its name in UpstreamFixes and its row in FIXES. Workarounds outside the Trainer are next
to the code that needs them, and also have a row. If requirements.txt pins a different version than a row, a unit test
fails and prints the condition of that row.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from distributed.collectives import print_once
from distributed.inspect_fsdp import local


class Fix(NamedTuple):
    place: str  # a file in scripts/, and a name in that file
    seen_in: str  # the library and version with the error, as in requirements.txt
    removable_when: str  # the condition that a later version must meet


FIXES = (
    Fix(
        "training/upstream_fixes.py::LossIn32Bits",
        "accelerate==1.15.0",
        "FullyShardedDataParallelPlugin.set_mixed_precision leaves output_dtype None",
    ),
    Fix(
        "training/upstream_fixes.py::WholeNumberOfTokens",
        "transformers==5.23.0",
        "Trainer._get_num_items_in_batch returns a whole number",
    ),
    Fix(
        "training/upstream_fixes.py::SkippedStepOfFusedOptimizer",
        "torch==2.13.0",
        "ShardedGradScaler.unscale_ of FSDP1 reduces found_inf by MAX, in a shape that the fused AdamW accepts",
    ),
    Fix(
        "training/upstream_fixes.py::LossScaleOfStage0",
        "deepspeed==0.19.8",
        "the engine's backward scales the loss for the optimizers of stage 0 (deepspeedai/DeepSpeed#8393), and "
        "FP16_UnfusedOptimizer reports the norm of the unscaled gradients",
    ),
    Fix(
        "training/upstream_fixes.py::NormOfScaledGradients",
        "transformers==5.23.0",
        "Trainer._mixed_mesh_grad_norm unscales the gradients first",
    ),
    Fix(
        "training/upstream_fixes.py::GroupScaler",
        "torch==2.13.0",
        "GradScaler.unscale_ accepts DTensors and plain tensors together",
    ),
    Fix(
        "training/upstream_fixes.py::NoStepAfterTheLast",
        "transformers==5.23.0",
        "Trainer._inner_training_loop checks max_steps and should_training_stop before it begins an epoch",
    ),
    Fix(
        "training/upstream_fixes.py::OptimizerStateOfFSDP",
        "accelerate==1.15.0",
        "load_fsdp_optimizer gives torch the optimizer inside AcceleratedOptimizer",
    ),
    Fix(
        "training/upstream_fixes.py::RateOfTheStep",
        "transformers==5.23.0",
        "with DeepSpeed, the Trainer logs the learning rate that the step has used",
    ),
    Fix(
        "training/upstream_fixes.py::RateOfAnotherSchedule",
        "transformers==5.23.0",
        "after a resume with more epochs, the first step has the learning rate of the new schedule",
    ),
    Fix(
        "training/upstream_fixes.py::CheckpointOfRenamedWeights",
        "transformers==5.23.0",
        "Trainer._load_from_checkpoint loads a checkpoint of GPT-NeoX without missing keys",
    ),
    Fix(
        "model.py::share_weights",
        "transformers==5.23.0",
        "the version of safetensors that it requires writes files whose mode follows the umask (safetensors issue 782)",
    ),
    Fix(
        "models/bloom_sdpa.py::SDPABloomModel",
        "transformers==5.23.0",
        "BLOOM accepts attn_implementation='sdpa'",
    ),
    Fix(
        "measure/exact_match.py::root_gathered",
        "torch==2.13.0",
        "generate() of a model with FSDP1 gathers the parameters outside its blocks",
    ),
    Fix(
        "model.py::save_model",
        "transformers==5.23.0",
        "Trainer.save_model writes weights after a training run with FSDP and sharded checkpoints",
    ),
    Fix(
        "settings/validation.py::contradictions",
        "torch==2.13.0",
        "torch.compile in the mode max-autotune works with --tf32",
    ),
    Fix(
        "distributed/fsdp_config.py::shard_on_cpu",
        "accelerate==1.15.0",
        "the Accelerator shards with FSDP on a CPU (MULTI_CPU), where it now runs DDP",
    ),
    Fix(
        "distributed/tensor_parallel.py::apply_tensor_parallel",
        "transformers==5.23.0",
        "from_pretrained cuts and shards an embedding and its tied head as one parameter",
    ),
    Fix(
        "distributed/tensor_parallel.py::BY_OUTPUTS",
        "transformers==5.23.0",
        "gradients of replicated_with_grad_allreduce are summed once per step, not in each micro batch",
    ),
    Fix(
        "distributed/tensor_parallel.py::apply_tensor_parallel",
        "torch==2.13.0",
        "the gradient of an embedding that is a DTensor is cut as its weight",
    ),
    Fix(
        "distributed/process_group.py::bind_device",
        "torch==2.13.0",
        "torch.cuda.device_count() is 0 with a driver that is too old, even after an import of deepspeed; and, for "
        "enable_cudnn_sdp, cuDNN's attention does not build a plan for each new shape (modelscope/FunASR#3704)",
    ),
    Fix(
        "distributed/process_group.py::adopt_process_group",
        "deepspeed==0.19.8",
        "init_distributed on a CPU does not compile deepspeed_shm_comm (deepspeed/comm/torch.py, build_shm_op)",
    ),
    Fix(
        "distributed/process_group.py::run_and_exit",
        "torch==2.13.0",
        "1,000 sharded training runs over gloo that call sys.exit end without SIGABRT",
    ),
    Fix(
        "distributed/process_group.py::silence_known_warnings",
        "deepspeed==0.19.8",
        "DeepSpeed calls no collective by a name that is deprecated in PyTorch",
    ),
    Fix(
        "distributed/process_group.py::silence_known_warnings",
        "torch==2.13.0",
        "HYBRID_SHARD, and tensor parallelism with FSDP, log none of these warnings",
    ),
    Fix(
        "distributed/process_group.py::silence_known_warnings",
        "accelerate==1.15.0",
        "the Accelerator does not compare DeepSpeed's gradient accumulation with its own default",
    ),
    Fix(
        "estimate/model_shape.py::model_without_storage",
        "torch==2.13.0",
        "torch.nn.functional.grouped_mm accepts fp32 tensors without storage, and flop_counter has a formula for it",
    ),
    Fix(
        "launch.py::join_nodes",
        "torch==2.13.0",
        "Python runs the handler of a signal while a TCPStore waits for the other nodes",
    ),
    Fix(
        "launch.py::final_barrier",
        "torch==2.13.0",
        "torchrun's first node, which holds the store, waits in _exit_barrier until no other node needs it",
    ),
    Fix(
        "distributed/process_group.py::leave_process_group",
        "torch==2.13.0",
        "the Python binding of c10d::Reducer releases the GIL in its destructor, as those of process groups do",
    ),
)


class LossIn32Bits(Trainer):
    """With FSDP2 in 16-bit precision, the loss loses digits: in bf16 it keeps two or three, in fp16 it overflows.

    accelerate's policy for FSDP2 casts the model's output, and so the loss, to 16 bits. fp16's loss scale begins at
    65,536, which is too large for fp16 (accelerate/utils/dataclasses.py, set_mixed_precision).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            # train() reads the policy when it wraps the model
            plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)


class WholeNumberOfTokens(Trainer):
    """With FSDP in 16-bit precision, the loss is divided by a wrong number of tokens.

    transformers passes the number to the model as a float, and FSDP casts all float inputs of the model to 16 bits. In
    bf16 the number is wrong by up to 0.4 %. In fp16 it is infinite above 65,504 (transformers/trainer.py,
    _get_num_items_in_batch). FSDP does not cast integers, so this class passes an integer.
    """

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.is_fsdp_enabled and torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.long()
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class SkippedStepOfFusedOptimizer(Trainer):
    """With FSDP1 in fp16, a fused AdamW raises an error when a step overflows.

    A fused optimizer skips such a step in its own kernel. FSDP1's scaler sums the overflow flags (found_inf) of the
    ranks, in a shape that the kernel rejects. Also, the kernel skips a step only if the sum is exactly 1
    (torch/distributed/fsdp/sharded_grad_scaler.py, ATen/native/cuda/fused_adam_utils.cuh). With the attribute set to
    False, the scaler itself skips the step, and the learning rate does not advance, as with DeepSpeed.
    """

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer: Any = super().create_optimizer(*args, **kwargs)
        optimizer._step_supports_amp_scaling = False
        return optimizer


class LossScaleOfStage0(Trainer):
    """With ZeRO stage 0 in fp16, the model barely learns: its gradients are 65,536 times too small.

    DeepSpeed scales the loss only for a ZeROOptimizer (deepspeed/runtime/engine.py, backward). But the optimizers of
    stage 0 also divide the gradients by the scale, and Adam's epsilon is then larger than the gradients
    (deepspeedai/DeepSpeed#8393). FP16_UnfusedOptimizer, which runs PyTorch's AdamW, also reports the norm of the scaled
    gradients.
    """

    scale_of_norm = 1.0  # factor by which the reported norm is too large

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(model, *args, **kwargs)
        if self.is_deepspeed_enabled and model.training:
            self.scale_of_norm = self.scale_gradient(loss, model.optimizer)
        return loss

    @staticmethod
    def scale_gradient(loss: torch.Tensor, optimizer: Any) -> float:
        """Multiply the gradient of the loss by the loss scale. Return the new `scale_of_norm`."""
        from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
        from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

        if not isinstance(optimizer, FP16_Optimizer | FP16_UnfusedOptimizer) or not loss.requires_grad:
            return 1.0
        scale = optimizer.loss_scale_config.cur_scale
        # A gradient above 1 is already scaled, by a newer version of DeepSpeed
        loss.register_hook(lambda gradient: torch.where(gradient > 1, gradient, gradient * scale))
        return scale if isinstance(optimizer, FP16_UnfusedOptimizer) else 1.0

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        return norm if self.scale_of_norm == 1 else norm / self.scale_of_norm


class NormOfScaledGradients(Trainer):
    """With tensor parallelism in fp16, the norm for clipping and logging is 65,536 times too large.

    transformers computes the norm over cut and whole gradients without first dividing the gradients by the loss scale
    (transformers/trainer.py, _mixed_mesh_grad_norm).
    """

    def _mixed_mesh_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.unscale_gradients()
        return super()._mixed_mesh_grad_norm(*args, **kwargs)


class GroupScaler(torch.amp.GradScaler):
    """With tensor parallelism in fp16, PyTorch's scaler rejects a mix of cut gradients (DTensors) and whole gradients.

    This scaler uses the local part of each gradient (torch/amp/grad_scaler.py, _unscale_grads_). If a gradient
    overflows on one rank, all ranks skip the step.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}


class ScalerOfTensorParallelism(Trainer):
    """Use the GroupScaler for tensor parallelism in fp16."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.get_tp_size() > 1 and self.accelerator.scaler:
            self.accelerator.scaler = GroupScaler(self.args.device.type)


class NoStepAfterTheLast(Trainer):
    """After a resume from step --max_steps, or after a stop, the Trainer trains one step too many.

    The Trainer checks only after an epoch whether the training has ended (transformers/trainer.py,
    _inner_training_loop). This class also checks before an epoch.
    """

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)


class OptimizerStateOfFSDP(Trainer):
    """With FSDP2 in fp16, a run cannot resume: the loss scaler raises an AssertionError.

    To load an optimizer's state, PyTorch performs a step with zero gradients. accelerate passes an
    AcceleratedOptimizer to PyTorch, and this wrapper passes the step to the loss scaler, which has not scaled any loss
    yet (accelerate/utils/fsdp_utils.py, load_fsdp_optimizer).
    """

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        prepared: Any = self.optimizer
        if self.is_fsdp_enabled:
            self.optimizer = prepared.optimizer
        super()._load_optimizer_and_scheduler(checkpoint)
        self.optimizer = prepared


class RateOfTheStep(Trainer):
    """With DeepSpeed, the log shows the learning rate of the next step.

    DeepSpeed's engine steps the schedule at the end of the backward pass. transformers reads the rate after this
    (transformers/trainer.py, _run_epoch).
    """

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.rate_of_step = float(self.get_learning_rates()[0])
        return super().training_step(*args, **kwargs)

    def _get_learning_rate(self) -> float:
        return self.rate_of_step


class RateOfAnotherSchedule(Trainer):
    """After a resume with another number of steps, the first step has the rate of the old schedule, which may be 0.

    The optimizer's state contains the rate of the next step, and the schedule changes it only after that step.
    """

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint:
            before = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME)).max_steps
            schedule: Any = self.lr_scheduler
            schedule = getattr(schedule, "scheduler", schedule)  # accelerate wraps the schedule of DeepSpeed
            # Other schedules, such as ReduceLROnPlateau, do not depend on the number of steps
            counter = "last_epoch" if isinstance(schedule, LambdaLR) else "last_batch_iteration"
            if before != max_steps and hasattr(schedule, counter):
                setattr(schedule, counter, getattr(schedule, counter) - 1)
                schedule.step()  # repeats the last step of the schedule, now with the new number of steps
                print_once(
                    f"the schedule of the learning rate has {max_steps} steps instead of {before}: "
                    f"the next step has the rate {self.get_learning_rates()[0]:.4g}"
                )
        return prepared


class CheckpointOfRenamedWeights(Trainer):
    """Save a checkpoint's weights under the names of the model's modules.

    save_pretrained writes the names of older versions for GPT-NeoX, Mixtral and other models. The Trainer does not know
    them when it loads a checkpoint, so these weights would keep their first values.
    """

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        model: Any = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)  # FSDP1 wraps it
        model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
        super()._save_checkpoint(*args, **kwargs)
        del model.save_pretrained  # the saved model has the original names


class UpstreamFixes(
    LossIn32Bits,
    WholeNumberOfTokens,
    SkippedStepOfFusedOptimizer,
    LossScaleOfStage0,
    NormOfScaledGradients,
    ScalerOfTensorParallelism,
    NoStepAfterTheLast,
    OptimizerStateOfFSDP,
    RateOfTheStep,
    RateOfAnotherSchedule,
    CheckpointOfRenamedWeights,
):
    """transformers' Trainer with all workarounds above."""
