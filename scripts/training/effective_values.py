"""The values that take effect, read from the live Trainer, the DeepSpeed engine and the wrapped model.

distributed/inspect_fsdp.py reads the values of FSDP. In this file, `engine` is DeepSpeed's engine, or None without
DeepSpeed.
"""

from collections.abc import Iterable
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import DataCollatorForSeq2Seq, Trainer

from data_loader import IGNORED
from distributed import inspect_fsdp
from distributed.fsdp_config import wrap_classes
from distributed.strategy import DDP, PLAIN, TENSOR_PARALLEL, TENSOR_PARALLEL_FSDP2, ZERO, Strategy
from training.sampling import GroupByLengthSampler, find_sampler


def effective_strategy(trainer: Any, engine: Any) -> Strategy:
    if engine is not None:
        return ZERO[int(engine.zero_optimization_stage())]
    if isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel):
        return DDP
    mesh = inspect_fsdp.tensor_mesh(trainer.model)
    if mesh:
        return TENSOR_PARALLEL_FSDP2 if "fsdp" in mesh else TENSOR_PARALLEL
    return inspect_fsdp.live_strategy(trainer.model_wrapped, wrap_classes({}, trainer.model)) or PLAIN


def effective_precision(trainer: Trainer, engine: Any) -> str:
    if engine is None:
        return {"no": "fp32"}.get(trainer.accelerator.mixed_precision, trainer.accelerator.mixed_precision)
    # After initialisation the module holds the working copy, and the optimizer holds the fp32 masters
    return dtype_names(engine.module.parameters())


def dtype_names(parameters: Iterable[torch.nn.Parameter]) -> str:
    """Return the dtypes of the parameters, such as ``bf16`` or ``bf16+fp32``, or ``none`` without parameters."""
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    return "+".join(sorted({names.get(each.dtype, str(each.dtype)) for each in parameters})) or "none"


def effective_batch(trainer: Any, engine: Any) -> tuple[int, int, int]:
    """Return micro batch, accumulation, and the number of groups that compute different questions.

    A group is one rank, or a tensor group.
    """
    groups = trainer.accelerator.num_processes // trainer.get_tp_size()
    if engine is not None:
        return engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(), groups
    loader = trainer.callback_handler.train_dataloader
    return loader.total_batch_size // groups, trainer.args.gradient_accumulation_steps, groups


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's class and library, and whether it is fused: ``AdamW (torch, fused)``."""
    library = type(optimizer).__module__.split(".")[0]
    fused = ", fused" if optimizer.defaults.get("fused") else ""
    return f"{type(optimizer).__name__} ({library}{fused})"


def sampling_name(loader: Any) -> str:
    """Return the name of the order in which a DataLoader reads the questions."""
    names = {GroupByLengthSampler: "group_by_length", SequentialSampler: "sequential"}
    return names.get(type(find_sampler(loader)), "random")


def label_mode(dataset: Dataset, collator: DataCollatorForSeq2Seq) -> str:
    """Return the label mode, read from the labels: it decides which tokens count in the loss."""
    if dataset[0]["labels"][0] == IGNORED:  # the first token belongs to the prompt
        return "answer"
    return "sequence" if collator.label_pad_token_id == IGNORED else "all"


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether any part of a wrapped model is compiled, or will be at its first call."""
    return any(
        isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )


def optimizer_partitions(engine: Any) -> list[torch.Tensor]:
    """Return this rank's fp32 master weights if they are offloaded to the CPU, otherwise an empty list."""
    optimizer = engine.optimizer
    offloaded = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
    masters = getattr(optimizer, "single_partition_of_fp32_groups", None) or getattr(
        optimizer, "fp32_partitioned_groups_flat", []
    )
    return [t for t in masters if t.device.type == "cpu"] if offloaded else []


def optimizer_buffers(engine: Any, masters: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
    """Return the buffers that `offload_optimizer.pin_memory` applies to, and a note on the buffers that it ignores.

    Stages 1 and 2 pin the fp32 masters and their gradients (stage_1_and_2.py). Stage 3 pins only the gradients
    (stage3.py, grad_partitions_flat_buffer). No stage pins Adam's moments, because the optimizer creates them with
    zeros_like.
    """
    if masters and int(engine.zero_optimization_stage()) == 3:
        return [engine.optimizer.grad_partitions_flat_buffer], "gradients; masters and Adam's moments never are"
    gradients = [master.grad for master in masters if master.grad is not None]
    return [*masters, *gradients], "fp32 masters and gradients; Adam's moments never are"


def parameter_partitions(engine: Any) -> list[torch.Tensor]:
    """Return this rank's shards of the parameters if ZeRO-3 keeps them in CPU memory, otherwise an empty list."""
    if not getattr(engine.optimizer, "offload_param", False):
        return []
    shards = [p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor")]
    return [t for t in shards if t.device.type == "cpu"]


def is_pinned(tensors: list[torch.Tensor]) -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(tensors) and all(get_accelerator().is_pinned(t) for t in tensors)
