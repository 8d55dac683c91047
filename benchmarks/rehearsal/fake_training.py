"""Rehearse a training run: run its real code as rank 0 of many ranks, in one process and without memory for tensors.

PyTorch's fake process group replaces the network: a collective returns at once and sends nothing. Under FakeTensorMode
a tensor has a shape and a size, but no values. The Trainer, DDP, FSDP2, DeepSpeed and the optimizer are those of
train.py, so the model is wrapped as in a run. observer.py observes the last of a few optimizer steps.
"""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from data_loader import OneRow
from distributed.config_file import sharding_arguments
from distributed.ds_config import offloaded
from distributed.fsdp_config import shard_on_cpu
from distributed.inspect_fsdp import local, unit_group
from distributed.process_group import adopt_process_group, prepare_deepspeed, silence_known_warnings
from distributed.strategy import choose_strategy
from distributed.tensor_parallel import apply_tensor_parallel
from estimate.model_shape import device_rules, forward_pass, model_without_storage
from measure.measured_memory import gradient_tensors, optimizer_tensors
from measure.profiling import mark_phases
from models.chunked_loss import use_chunked_loss
from models.lora import add_adapters
from rehearsal.observer import ObservedStep, Observer
from settings.settings import Settings
from settings.trainer_flags import trainer_flags
from shared.errors import WorkshopError
from training.trainer import WorkshopTrainer


def observe_gradient(parameter: torch.Tensor, observer: Observer, kind: str) -> None:
    parameter.register_post_accumulate_grad_hook(lambda leaf: observer.note(local(leaf.grad), kind))


def tensors(rows: list[dict]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


class FakeTrainer(WorkshopTrainer):
    """WorkshopTrainer with artificial batches, and with an observer of the last step."""

    def __init__(self, observer: Observer, settings: Settings, **kwargs: Any) -> None:
        super().__init__(tokenizer=None, **kwargs)
        self.remove_callback(PrinterCallback)
        self.observer = observer
        mark_phases(self, observer.in_phase)
        self.length = settings.data.max_length  # tokens of a sequence
        self.one_row = settings.data.padding == "none"
        self.zero_stage = settings.zero.get("stage", 0)

    def check_loss(self, compute: Any) -> None:
        """Check nothing: a tensor without storage has no value."""

    def get_train_dataloader(self) -> DataLoader:
        row = dict.fromkeys(("input_ids", "attention_mask", "labels"), [1] * self.length)
        questions = self.args.max_steps * self.args.gradient_accumulation_steps * self.args.train_batch_size
        collator = OneRow() if self.one_row else tensors
        return DataLoader([row] * questions, self.args.train_batch_size, collate_fn=collator)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        wrapped: Any = self.model_wrapped
        if isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
            # DDP's default hook expects a tensor from the collective, and the fake process group returns none
            wrapped.register_comm_hook(None, average)
        if self.is_deepspeed_enabled:
            wrapped.step = self.observer.in_phase("optimizer")(wrapped.step)  # DeepSpeed's `backward` calls `step`
        return prepared

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, Any]:
        """Return the batches of the next step, and start to observe before the last step."""
        if self.state.global_step == self.args.max_steps - 1:
            self.begin_last_step()
        batches, labels_in_step = super().get_batch_samples(*args, **kwargs)
        for batch in batches:
            if "label_count" in batch:  # the chunked loss needs a number, and a count of fake labels has no value
                batch["label_count"] = len(batch.get("rows", batch["labels"])) * (self.length - 1)
        return batches, labels_in_step

    def begin_last_step(self) -> None:
        """Register with the observer the storages of the model, FSDP2 and the optimizer."""
        observer = self.observer
        model: Any = self.model
        for tensor in optimizer_tensors(self.plain_optimizer):
            if isinstance(tensor, torch.Tensor):
                observer.note(local(tensor), "optimizer state")
        for parameter in model.parameters():
            observer.note(local(getattr(parameter, "ds_tensor", parameter)), "parameters")
            if parameter.requires_grad and not self.is_deepspeed_enabled:
                observe_gradient(parameter, observer, "gradients")
        observer.gradients = self.kept_gradients
        # FSDP2 computes the gradients of whole parameters, and holds them until the last backward pass of a step
        whole = "gradients" if self.args.gradient_accumulation_steps > 1 else "buffers"
        for group in [unit_group(unit) for unit in model.modules() if isinstance(unit, FSDPModule)]:
            for parameter in group.fsdp_params if group else []:
                if parameter._unsharded_param.requires_grad:
                    observe_gradient(parameter._unsharded_param, observer, whole)
                for gathered in parameter.all_gather_outputs:
                    observer.note(gathered, "buffers")
        self.last_step = observer.begin()

    @property
    def plain_optimizer(self) -> Any:
        """The optimizer without the wrapper of accelerate or DeepSpeed."""
        wrapper: Any = self.deepspeed if self.is_deepspeed_enabled else self.optimizer
        return wrapper.optimizer

    def kept_gradients(self) -> list:
        """Return the gradients that exist until the optimizer step, without temporary gradients."""
        optimizer = self.plain_optimizer
        if not self.is_deepspeed_enabled:
            return [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        kept = gradient_tensors(torch.nn.Identity() if self.zero_stage >= 2 else self.model, optimizer)
        averaged = getattr(optimizer, "averaged_gradients", {}).values()  # ZeRO-2 keeps its gradients here
        return [*kept, *tree_leaves(list(averaged))]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """End the observed step, so that nothing after it counts."""
        self.observer.begin()


def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook that all-reduces a bucket."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def check_rehearsal(settings: Settings) -> None:
    """Raise WorkshopError (exit code 2) for a training run that cannot be rehearsed."""
    trainer = settings.trainer
    if settings.estimate.gpus < 2:
        raise settings.error("gpus", "one rank has no communication to rehearse", "give 2 or more")
    if offloaded(settings.zero, "optimizer") or offloaded(settings.zero, "param"):
        what = "offload needs a GPU to offload from, and a rehearsal has none"
        raise settings.error("deepspeed", what, "use a config without offload, or estimate_memory.py")
    config = settings.fsdp_config or {}
    source = trainer.fsdp_config or "--fsdp"
    if config.get("version") == 1:
        raise WorkshopError(source, "FSDP1 needs a GPU, and a rehearsal has none", "use an FSDP2 config")
    if config.get("cpu_offload"):
        what = "cpu_offload needs a GPU to offload from, and a rehearsal has none"
        raise WorkshopError(source, what, "use another config, or estimate_memory.py")
    for flag in ("torch_compile", "use_liger_kernel"):
        if getattr(trainer, flag):
            raise settings.error(flag, "compiles kernels, and a rehearsal cannot run them", "leave it out")


def rehearse(settings: Settings) -> ObservedStep:
    """Run a few optimizer steps as rank 0, and return the memory and messages of the last step.

    fp16 is rehearsed as bf16, which has the same size.
    """
    # Start from fp32 weights, as train.py does. The Trainer adds autocast and checkpointing
    planned = forward_pass(settings)
    forward = replace(planned, precision="fp32", autocast=False, recomputes=False, lora_rank=0)
    degrees = choose_strategy(settings, settings.estimate.gpus).degrees
    with fake_world(settings) as arguments:
        with model_without_storage(forward) as model:
            fake_mode = next(model.parameters()).fake_mode
            if planned.lora_rank:
                with fake_mode:
                    add_adapters(model, planned.lora_rank, planned.dtype)
            fake_mode.allow_non_fake_inputs = True  # the Trainer's own counts are real tensors
        # The model is on its device already, and `to` raises for fake tensors
        model.to = lambda *args, **kwargs: model
        if settings.model.loss == "chunked":
            use_chunked_loss(model)
        if degrees.tensor > 1:
            apply_tensor_parallel(model, degrees, arguments.device)
        if settings.fsdp_config is not None or degrees.tensor > 1:
            shard_on_cpu()
        for number, parameter in enumerate(model.parameters()):
            # accelerate identifies a parameter by its address, which is 0 for all fake tensors. Without this line the
            # optimizer would update only one parameter
            parameter.data_ptr = lambda number=number: number
        observer = Observer()
        trainer = FakeTrainer(observer, settings, model=model, args=arguments)
        with fake_mode, observer.watching(), device_rules(planned.on_cpu):
            trainer.train()
    return trainer.last_step


def leave_fake_world() -> None:
    """Reset the global state, so that the next rehearsal in this process can have another world size."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()  # otherwise transformers would shard the next model of this process
    from deepspeed.comm import comm  # this import is fast, because accelerate has already imported DeepSpeed

    if comm.cdb is None:
        dist.destroy_process_group()
    else:
        comm.destroy_process_group()
        comm.cdb = None


@contextlib.contextmanager
def fake_world(settings: Settings) -> Iterator[TrainingArguments]:
    """Make this process rank 0 of a world without other processes, and restore the process at the end."""
    given = settings.estimate
    world = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(given.gpus),
        "LOCAL_WORLD_SIZE": str(given.gpus // given.nodes),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # accelerate warns if the variable is unset
        "ACCELERATE_TORCH_DEVICE": "cpu",  # accelerate's default is cpu:0, which is another device for fake tensors
    }
    import torch.distributed.fsdp._fully_shard._fully_shard as fully_shard

    default_mesh = fully_shard._init_default_mesh

    def mesh_with_values(*args: Any) -> Any:
        with unset_fake_temporarily():
            return default_mesh(*args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, world))
        # FSDP reads the ranks from the mesh, which therefore needs values
        stack.enter_context(patch.object(fully_shard, "_init_default_mesh", mesh_with_values))
        # ZeRO-3 replaces this function and does not restore it
        stack.enter_context(patch.object(functional, "linear", functional.linear))
        # DDP compares the values of shapes between ranks, and fake tensors have none
        verify = "torch.nn.parallel.distributed._verify_param_shape_across_processes"
        stack.enter_context(patch(verify, lambda *args: None))
        silence_known_warnings()
        # DeepSpeed checks the alignment of addresses, and fake tensors have none
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        prepare_deepspeed()  # sets variables that DeepSpeed reads when accelerate imports it
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=given.gpus)
        stack.callback(leave_fake_world)
        flags = trainer_flags(settings) | {
            "output_dir": stack.enter_context(tempfile.TemporaryDirectory()),
            "use_cpu": True,
            "fp16": False,
            "bf16": settings.precision != "fp32",
            # The first step creates Adam's moments. DDP creates its final buckets in the second step
            "max_steps": 2 if settings.fsdp_config is not None else 3,
            "eval_strategy": "no",
            "save_strategy": "no",
            "logging_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        arguments = TrainingArguments(**flags | sharding_arguments(settings))
        with contextlib.redirect_stdout(None):
            adopt_process_group(arguments, with_deepspeed=settings.deepspeed_config is not None)
        yield arguments
