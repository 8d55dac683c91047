"""Workarounds for errors and gaps of the libraries. None of them belongs to what the workshop teaches.

Here, each class repairs one behaviour of transformers' Trainer; UpstreamFixes combines them. To remove a workaround,
delete its class, its name in UpstreamFixes and its row of FIXES. Workarounds that the Trainer does not need are next to
the code that needs them, and have a row as well. A unit test fails when requirements.txt pins another version than a
row names, and prints the condition of that row.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import Trainer

from distributed.inspect_fsdp import local
from training.sampling import GroupByLengthSampler, find_sampler


class Fix(NamedTuple):
    place: str  # file below scripts/, and a name in it
    seen_in: str  # the version with the behaviour, as requirements.txt names it
    removable_when: str  # what has to be true of a later version


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
        "training/upstream_fixes.py::EpochOfSampler",
        "accelerate==1.15.0",
        "DataLoaderShard.set_epoch reaches a sampler inside a BatchSamplerShard",
    ),
    Fix(
        "training/upstream_fixes.py::OptimizerStateOfFSDP",
        "accelerate==1.15.0",
        "load_fsdp_optimizer gives torch the optimizer inside AcceleratedOptimizer",
    ),
    Fix(
        "training/sampling.py::GroupByLengthSampler",
        "transformers==5.23.0",
        "LengthGroupedSampler draws its order from the seed and the epoch, and groups over the global batch",
    ),
    Fix(
        "training/bloom_sdpa.py::SDPABloomModel",
        "transformers==5.23.0",
        "BLOOM accepts attn_implementation='sdpa'",
    ),
    Fix(
        "training/exact_match.py::root_gathered",
        "torch==2.13.0",
        "generate() of a model with FSDP1 gathers the parameters outside its blocks",
    ),
    Fix(
        "model.py::save_model",
        "transformers==5.23.0",
        "Trainer.save_model writes weights after a training with FSDP and sharded checkpoints",
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
        "from_pretrained cuts and shards a head that is tied to the embedding as one parameter with it",
    ),
    Fix(
        "distributed/tensor_parallel.py::BY_OUTPUTS",
        "transformers==5.23.0",
        "gradients of replicated_with_grad_allreduce are summed once per step, not in each micro batch",
    ),
    Fix(
        "distributed/process_group.py::bind_device",
        "torch==2.13.0",
        "torch.cuda.device_count() is 0 under a driver that is too old, after an import of deepspeed too; and, for "
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
        "1,000 sharded trainings over gloo that end by sys.exit end without SIGABRT",
    ),
    Fix(
        "distributed/process_group.py::silence_known_warnings",
        "deepspeed==0.19.8",
        "DeepSpeed calls no collective by a name that PyTorch deprecates",
    ),
    Fix(
        "distributed/process_group.py::silence_known_warnings",
        "torch==2.13.0",
        "HYBRID_SHARD, and tensor parallelism with FSDP, log no warning of these",
    ),
    Fix(
        "distributed/process_group.py::silence_known_warnings",
        "accelerate==1.15.0",
        "the Accelerator does not compare DeepSpeed's gradient accumulation with its own default",
    ),
    Fix(
        "launch.py::leave_last",
        "torch==2.13.0",
        "torchrun's first node, which holds the store, waits in _exit_barrier until no other node needs it",
    ),
)


class LossIn32Bits(Trainer):
    """With FSDP2 in 16 bit, the loss loses digits: in bf16 it keeps two or three, in fp16 it overflows.

    accelerate's policy for FSDP2 casts the model's output, and so the loss, to 16 bit. The loss scale of fp16 begins at
    65,536, which fp16 cannot represent (accelerate/utils/dataclasses.py, set_mixed_precision).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            # train() reads the policy when it wraps the model
            plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)


class WholeNumberOfTokens(Trainer):
    """With FSDP in 16 bit, the loss is divided by a wrong number of tokens.

    transformers passes that number to the model as a float, and FSDP casts floats that go into the model. In bf16 the
    number is wrong by up to 0.4 %, in fp16 it is infinite above 65,504 (transformers/trainer.py,
    _get_num_items_in_batch). FSDP does not cast integers.
    """

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.is_fsdp_enabled and torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.long()
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class SkippedStepOfFusedOptimizer(Trainer):
    """With FSDP1 in fp16, a fused AdamW ends in an error when a step overflows.

    A fused optimizer skips such a step in its own kernel. FSDP1's scaler sums over the ranks what each has found, in a
    shape that the kernel refuses, and the kernel skips only at a sum of exactly 1
    (torch/distributed/fsdp/sharded_grad_scaler.py, ATen/native/cuda/fused_adam_utils.cuh). Without this attribute the
    scaler skips the step, and the learning rate waits, as with DeepSpeed.
    """

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer: Any = super().create_optimizer(*args, **kwargs)
        optimizer._step_supports_amp_scaling = False
        return optimizer


class LossScaleOfStage0(Trainer):
    """With ZeRO stage 0 in fp16, the model barely learns: its gradients are 65,536 times too small.

    DeepSpeed scales the loss only for a ZeROOptimizer (deepspeed/runtime/engine.py, backward). The optimizers of stage
    0 divide the gradients by the scale all the same, and Adam's epsilon is then larger than the gradients
    (deepspeedai/DeepSpeed#8393). FP16_UnfusedOptimizer, which runs PyTorch's AdamW, also reports the norm of the scaled
    gradients.
    """

    scale_of_norm = 1.0  # the reported norm is so many times too large

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(model, *args, **kwargs)
        if self.is_deepspeed_enabled and model.training:
            self.scale_of_norm = self.scale_gradient(loss, model.optimizer)
        return loss

    @staticmethod
    def scale_gradient(loss: torch.Tensor, optimizer: Any) -> float:
        """Multiply the gradient of the loss by the loss scale, and return `scale_of_norm`."""
        from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
        from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

        if not isinstance(optimizer, FP16_Optimizer | FP16_UnfusedOptimizer):
            return 1.0
        scale = optimizer.loss_scale_config.cur_scale
        # a gradient above 1 is already scaled, by a later DeepSpeed
        loss.register_hook(lambda gradient: torch.where(gradient > 1, gradient, gradient * scale))
        return scale if isinstance(optimizer, FP16_UnfusedOptimizer) else 1.0

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        return norm if self.scale_of_norm == 1 else norm / self.scale_of_norm


class NormOfScaledGradients(Trainer):
    """With tensor parallelism in fp16, gradients are clipped and logged with a norm that is 65,536 times too large.

    transformers computes the norm of cut and whole gradients without dividing by the loss scale first
    (transformers/trainer.py, _mixed_mesh_grad_norm).
    """

    def _mixed_mesh_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.unscale_gradients()
        return super()._mixed_mesh_grad_norm(*args, **kwargs)


class GroupScaler(torch.amp.GradScaler):
    """With tensor parallelism in fp16, PyTorch's scaler refuses to mix cut gradients (DTensors) with whole ones.

    This one takes each rank's local part (torch/amp/grad_scaler.py, _unscale_grads_). An overflow on one rank skips the
    step on all ranks.
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
    """Uses the GroupScaler where it is needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.get_tp_size() > 1 and self.accelerator.scaler:
            self.accelerator.scaler = GroupScaler(self.args.device.type)


class NoStepAfterTheLast(Trainer):
    """From a checkpoint of step --max_steps, or after a stop, the Trainer would train one step more.

    It checks after an epoch whether the training ends, and not before (transformers/trainer.py, _inner_training_loop).
    """

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)


class EpochOfSampler(Trainer):
    """On several ranks, a resumed run would group the questions by length in the order of the first epoch.

    accelerate does not find the sampler inside the batch sampler of each rank, and so does not set its epoch
    (accelerate/data_loader.py, DataLoaderShard.set_epoch).
    """

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        sampler = find_sampler(kwargs["train_dataloader"])
        if isinstance(sampler, GroupByLengthSampler):
            sampler.epoch = kwargs["epoch"]
        super()._run_epoch(*args, **kwargs)


class OptimizerStateOfFSDP(Trainer):
    """With FSDP2 in fp16, a run cannot resume: the loss scaler raises an assertion.

    PyTorch loads an optimizer's state by a step over gradients of zero. accelerate hands it an AcceleratedOptimizer,
    which passes that step to the loss scaler, which has scaled nothing yet (accelerate/utils/fsdp_utils.py,
    load_fsdp_optimizer).
    """

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        prepared: Any = self.optimizer
        if self.is_fsdp_enabled:
            self.optimizer = prepared.optimizer
        super()._load_optimizer_and_scheduler(checkpoint)
        self.optimizer = prepared


class UpstreamFixes(
    LossIn32Bits,
    WholeNumberOfTokens,
    SkippedStepOfFusedOptimizer,
    LossScaleOfStage0,
    NormOfScaledGradients,
    ScalerOfTensorParallelism,
    NoStepAfterTheLast,
    EpochOfSampler,
    OptimizerStateOfFSDP,
):
    """transformers' Trainer with all the workarounds above."""
