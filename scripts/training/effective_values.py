"""The values that really take effect, read from the live Trainer, the DeepSpeed engine and the wrapped model.

FSDP's are in distributed/inspect_fsdp.py. An `engine` is DeepSpeed's, None without DeepSpeed.
"""

from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import DataCollatorForSeq2Seq, Trainer

from data_loader import IGNORED
from distributed import inspect_fsdp
from distributed.fsdp_config import wrap_classes
from training.sampling import GroupByLengthSampler, sampler_of


def effective_strategy(trainer: Any, engine: Any) -> str:
    if engine is not None:
        return f"DeepSpeed ZeRO-{int(engine.zero_optimization_stage())}"
    if isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel):
        return "DDP"
    mesh = inspect_fsdp.tensor_mesh(trainer.model)
    if mesh:
        return "TP x FSDP2" if "fsdp" in mesh else "TP"
    return inspect_fsdp.live_strategy(trainer.model_wrapped, wrap_classes({}, trainer.model)) or "plain"


def effective_precision(trainer: Trainer, engine: Any) -> str:
    if engine is None:
        return {"no": "fp32"}.get(trainer.accelerator.mixed_precision, trainer.accelerator.mixed_precision)
    # after initialisation the module holds the working copy; the fp32 masters are the optimizer's
    dtypes = {p.dtype for p in engine.module.parameters()}
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    return "+".join(sorted(names.get(dtype, str(dtype)) for dtype in dtypes))


def effective_batch(trainer: Any, engine: Any) -> tuple[int, int, int]:
    """Micro batch, accumulation, and how many ranks (of tensor groups: how many groups) have questions of their own."""
    groups = trainer.accelerator.num_processes // trainer.get_tp_size()
    if engine is not None:
        return engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(), groups
    loader = trainer.callback_handler.train_dataloader
    return loader.total_batch_size // groups, trainer.args.gradient_accumulation_steps, groups


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Its class, whose it is, and whether one kernel steps many parameters: ``AdamW (torch, fused)``."""
    library = type(optimizer).__module__.split(".")[0]
    fused = ", fused" if optimizer.defaults.get("fused") else ""
    return f"{type(optimizer).__name__} ({library}{fused})"


def sampling_of(loader: Any) -> str:
    """Name of the order in which a DataLoader reads the questions."""
    names = {GroupByLengthSampler: "group_by_length", SequentialSampler: "sequential"}
    return names.get(type(sampler_of(loader)), "random")


def labels_of(dataset: Dataset, collator: DataCollatorForSeq2Seq) -> str:
    """Which tokens count, from the labels themselves: the first belongs to the prompt."""
    if dataset[0]["labels"][0] == IGNORED:
        return "answer"
    return "sequence" if collator.label_pad_token_id == IGNORED else "all"


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether any part of a wrapped model is compiled, or will be at its first call."""
    return any(
        isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )


def optimizer_partitions(engine: Any) -> list[torch.Tensor]:
    """This rank's fp32 master weights if they are offloaded to the CPU, else an empty list."""
    optimizer = engine.optimizer
    offloaded = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
    masters = getattr(optimizer, "single_partition_of_fp32_groups", None) or getattr(
        optimizer, "fp32_partitioned_groups_flat", []
    )
    return [t for t in masters if t.device.type == "cpu"] if offloaded else []


def optimizer_buffers(engine: Any, masters: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
    """The buffers that `offload_optimizer.pin_memory` rules, and a note on those that it does not.

    Stages 1 and 2 pin the fp32 masters and their gradients (stage_1_and_2.py). Stage 3 pins only the gradients
    (stage3.py, grad_partitions_flat_buffer). No stage pins Adam's moments: the optimizer makes them with zeros_like.
    """
    if masters and int(engine.zero_optimization_stage()) == 3:
        return [engine.optimizer.grad_partitions_flat_buffer], "gradients; masters and Adam's moments never are"
    gradients = [master.grad for master in masters if master.grad is not None]
    return [*masters, *gradients], "fp32 masters and gradients; Adam's moments never are"


def parameter_partitions(engine: Any) -> list[torch.Tensor]:
    """This rank's shares of the parameters if ZeRO-3 keeps them in CPU memory, else an empty list."""
    if not getattr(engine.optimizer, "offload_param", False):
        return []
    shares = [p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor")]
    return [t for t in shares if t.device.type == "cpu"]


def is_pinned(tensors: list[torch.Tensor]) -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(tensors) and all(get_accelerator().is_pinned(t) for t in tensors)
