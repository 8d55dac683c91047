"""The knob audit: compare the requested value of each knob with the value that takes effect.

The audit is printed and recorded before the first step. A difference ends the run.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.training_args import OptimizerNames

from config import IGNORED
from distributed import inspect_fsdp
from distributed.collectives import gather_lists, rank, world_size
from distributed.fsdp_config import wrap_classes
from distributed.strategy import (
    DDP,
    PLAIN,
    TENSOR_PARALLEL,
    TENSOR_PARALLEL_FSDP2,
    WEIGHTS,
    ZERO,
    Strategy,
    choose_strategy,
)
from distributed.tensor_parallel import cut_parameters
from model import count_parameters, elements
from models.bloom_sdpa import attention_name
from models.chunked_loss import computes_loss_in_head
from models.lora import count_adapter_elements
from records.writer import RunRecord
from settings.settings import Settings
from shared.errors import ENVIRONMENT, WorkshopError

NOT_ON_CPU = "n/a on CPU"
SHARE_TOLERANCE = 0.05


# 1. The audit


@dataclass
class AuditedKnob:
    """Requested and effective value of a knob.

    binding: True if a difference ends the run. If False, the table shows the difference and the run continues.
    """

    name: str
    requested: object
    effective: object
    note: str = ""
    binding: bool = True

    @property
    def differs(self) -> bool:
        return self.binding and self.requested != self.effective and self.effective != NOT_ON_CPU


class AuditCallback(TrainerCallback):
    """Callback that prints and records the audit once the model is wrapped.

    A difference ends the run with exit code 3.
    """

    def __init__(self, trainer: Any, settings: Settings, record: RunRecord):
        self.trainer = trainer
        self.settings = settings
        self.record = record
        # Count before the model is wrapped: a model that FSDP1 has wrapped shows only this rank's shard
        self.parameters = count_parameters(trainer.model)
        self.trainable = sum(elements(p) for p in trainer.model.parameters() if p.requires_grad)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        knobs = audit(self.trainer, self.settings, self.parameters, self.trainable)
        if rank() == 0:
            print(audit_table(knobs), flush=True)
            if self.trainer.is_deepspeed_enabled:
                print(deepspeed_banner(self.trainer.model_wrapped), flush=True)
        self.record.update(
            knobs={k.name: {"requested": k.requested, "effective": k.effective} for k in knobs},
            parameters=self.parameters,
            trainable_parameters=self.trainable,
            steps_per_epoch=self.trainer.steps_per_epoch,
        )
        # Gather the differences, so that all ranks raise the same error. If only one rank raised it, the other ranks
        # would wait for that rank in the next collective
        for number, differing in enumerate(gather_lists([knob for knob in knobs if knob.differs])):
            for knob in differing:
                where = f" on rank {number}" if number else ""
                what = f"{knob.requested} was requested, {knob.effective} is what would run{where}"
                raise WorkshopError(f"knob audit: {knob.name}", what, "correct the flag or the config", ENVIRONMENT)


def audit(trainer: Any, settings: Settings, parameters: int, trainable: int) -> list[AuditedKnob]:
    """Return one entry per knob, in the order of the printed table.

    trainer: a Trainer whose model is wrapped. parameters, trainable: numbers of all parameters and of those with
    gradients, before the model was wrapped.
    """
    engine = trainer.model_wrapped if trainer.is_deepspeed_enabled else None
    requested = choose_strategy(settings)
    strategy = effective_strategy(trainer, engine)
    lora_rank = settings.model.lora_rank
    trained = count_adapter_elements(trainer.model, lora_rank) if lora_rank else parameters
    frozen = dtype_names(p for p in trainer.model.parameters() if not p.requires_grad)
    single_rank = requested == DDP and world_size() == 1
    note = "one rank has no gradients to average with" if single_rank else ""
    knobs = [
        AuditedKnob("precision", settings.precision, effective_precision(trainer, engine), settings.precision_note),
        # accelerate wraps the model of a single rank in DDP on a CPU, but not on a GPU
        AuditedKnob("strategy", requested.name, strategy.name, note, binding=not single_rank),
        optimizer_knob(trainer, engine, settings),
        # Without LoRA a difference is allowed, because some models freeze parameters by design, such as Pegasus
        AuditedKnob("trainable parameters", f"{trained:,}", f"{trainable:,}", binding=lora_rank > 0),
        # DeepSpeed keeps fp32 masters of its trainable weights
        AuditedKnob(
            "trainable weights",
            "fp32" if engine is None else settings.precision,
            dtype_names(p for p in trainer.model.parameters() if p.requires_grad),
        ),
        AuditedKnob("frozen weights", settings.precision if lora_rank else frozen, frozen),
    ]
    if engine is not None:
        knobs += offload_knobs(engine, settings.zero)
    if settings.fsdp_config is not None and WEIGHTS in strategy.shards and settings.model.tensor_parallel == 1:
        knobs += fsdp_knobs(trainer, settings.fsdp_config)
    if settings.model.tensor_parallel > 1:
        knobs += tensor_parallel_knobs(trainer, settings.model.tensor_parallel)
    knobs += batch_knobs(trainer, engine, settings)
    attention = attention_name(trainer.model)
    checkpointing = bool(settings.trainer.activation_checkpointing)
    knobs += [
        AuditedKnob("label mode", settings.data.labels, label_mode(trainer.train_dataset, trainer.data_collator)),
        AuditedKnob("loss", settings.model.loss, "chunked" if computes_loss_in_head(trainer.model) else "full"),
        AuditedKnob("attention", settings.model.attention or attention, attention),
        AuditedKnob("checkpointing", checkpointing, trainer.model.is_activation_checkpointing, "by the model itself"),
        AuditedKnob("compiled", settings.trainer.torch_compile, is_compiled(trainer.model_wrapped)),
    ]
    facts = {
        "padding": trainer.data_collator.padding,
        "train size": len(trainer.train_dataset),
        "eval size": len(trainer.eval_dataset),
        "steps per epoch": trainer.steps_per_epoch,
        "parameters": f"{parameters:,}",
        "device": str(trainer.args.device),
    }
    return knobs + [AuditedKnob(name, value, value) for name, value in facts.items()]


def batch_knobs(trainer: Any, engine: Any, settings: Settings) -> list[AuditedKnob]:
    micro = settings.trainer.per_device_train_batch_size
    accumulation = settings.trainer.gradient_accumulation_steps
    live_micro, live_accumulation, live_groups = effective_batch(trainer, engine)
    tensor_parallel = settings.model.tensor_parallel
    batch = micro * accumulation * world_size() // tensor_parallel
    live_batch = live_micro * live_accumulation * live_groups
    asked = settings.requested_accumulation or accumulation
    changed = "" if asked == accumulation else f"keeps the global batch of the checkpoint on {world_size()} rank(s)"
    note = "micro batch x accumulation x " + ("world size" if tensor_parallel == 1 else "tensor groups")
    return [
        AuditedKnob("world size", world_size(), trainer.accelerator.num_processes, "ranks, one per GPU"),
        AuditedKnob("micro batch", micro, live_micro, "sequences per rank and step"),
        AuditedKnob("gradient accumulation", asked, live_accumulation, changed, binding=not changed),
        AuditedKnob("global batch", batch, live_batch, note),
    ]


def optimizer_knob(trainer: Any, engine: Any, settings: Settings) -> AuditedKnob:
    """Compare the running optimizer with --optim or with the DeepSpeed file, if they request PyTorch's AdamW.

    Any other requested optimizer is not checked: the entry shows the running optimizer in both columns.
    """
    section = (settings.deepspeed_config or {}).get("optimizer")
    if section is None:
        asked = OptimizerNames(settings.trainer.optim).value
    elif section["params"].get("torch_adam") and section["params"].get("adam_w_mode", True):
        asked = "adamw_torch_fused" if section["params"].get("fused") else "adamw_torch"
    else:
        asked = ""
    effective = optimizer_name(trainer.optimizer.optimizer if engine is None else engine.basic_optimizer)
    names = {"adamw_torch_fused": "AdamW (torch, fused)", "adamw_torch": "AdamW (torch)"}
    return AuditedKnob("optimizer", names.get(asked, effective), effective)


def offload_knobs(engine: Any, zero: dict) -> list[AuditedKnob]:
    """Compare the place of optimizer state and parameters, and whether the buffers under `pin_memory` are pinned."""
    masters = optimizer_partitions(engine)
    buffers, note = optimizer_buffers(engine, masters)
    shards = parameter_partitions(engine)
    # partition_parameters.py follows `offload_param.pin_memory`, but only until the optimizer is created: stage3.py
    # then moves the shards into its own buffers, which are always pinned (_create_param_groups_fp16_flat_cpu_memory)
    always_pinned = "DeepSpeed always pins them once they are loaded"
    knobs = []
    for part, key, on_cpu, pinned, remark, binding in (
        ("optimizer", "offload_optimizer", masters, buffers, note, True),
        ("parameter", "offload_param", shards, shards, always_pinned, False),
    ):
        section = zero.get(key) or {}
        device = section.get("device", "none")
        knobs.append(AuditedKnob(f"{part} offload", device, "cpu" if on_cpu else "none"))
        if device != "none":
            pin = section.get("pin_memory", True)
            effective = is_pinned(pinned) if can_pin() else NOT_ON_CPU
            knobs.append(AuditedKnob(f"{part} pinned memory", pin, effective, remark, binding))
    return knobs


def can_pin() -> bool:
    return torch.cuda.is_available()


def fsdp_knobs(trainer: Trainer, config: dict) -> list[AuditedKnob]:
    """Compare units, shards, offload and checkpointing with the model as FSDP has wrapped it."""
    model = trainer.model_wrapped
    names = wrap_classes(config, trainer.model)
    blocks = len(inspect_fsdp.modules_by_class(model, names))
    units = len(inspect_fsdp.sharded_blocks(model, names))
    checkpointed = blocks if config.get("activation_checkpointing") else 0
    others = ", ".join(inspect_fsdp.other_units(model, names))
    mesh = f"{config['dp_replicate_size']} x {config['dp_shard_size']}"
    file_format = trainer.accelerator.state.fsdp_plugin.state_dict_type.name
    return [
        AuditedKnob("FSDP units", f"{blocks} blocks", f"{units} blocks", f"and {others}"),
        share_knob(model, 1 / config["dp_shard_size"]),
        AuditedKnob("mesh", mesh, inspect_fsdp.mesh_shape(model), "replicate x shard"),
        AuditedKnob("CPU offload", config.get("cpu_offload", False), inspect_fsdp.shard_is_on_cpu(model)),
        AuditedKnob(
            "checkpointed blocks", checkpointed, inspect_fsdp.checkpointed_blocks(model), "activations are recomputed"
        ),
        AuditedKnob("checkpoint format", config.get("state_dict_type", "FULL_STATE_DICT"), file_format),
    ]


def tensor_parallel_knobs(trainer: Any, tensor_parallel: int) -> list[AuditedKnob]:
    """Compare the tensor groups, the cut matrices, and the part of all parameters that this rank holds."""
    shards = world_size() // tensor_parallel
    mesh = inspect_fsdp.tensor_mesh(trainer.model)
    parameters = dict(trainer.model.named_parameters())
    names = cut_parameters(trainer.model)
    cut_here = [
        name for name in names if inspect_fsdp.local(parameters[name]).numel() < parameters[name].numel() / shards
    ]
    example = max(names, key=lambda name: parameters[name].numel())
    shapes = f"{tuple(inspect_fsdp.local(parameters[example]).shape)} of {tuple(parameters[example].shape)}"
    expected = sum(p.numel() / (tensor_parallel if name in names else 1) for name, p in parameters.items())
    expected /= shards * sum(p.numel() for p in parameters.values())
    return [
        AuditedKnob(
            "mesh",
            f"{shards} x {tensor_parallel}",
            f"{mesh.get('fsdp', 1)} x {mesh['tp']}",
            "shards x ranks of a tensor group",
        ),
        AuditedKnob("cut parameters", len(names), len(cut_here), f"{example}: {shapes} are on rank {rank()}"),
        share_knob(trainer.model, expected),
    ]


def share_knob(model: torch.nn.Module, expected: float) -> AuditedKnob:
    """Compare the part of all parameters that this rank holds with the expected part."""
    held = inspect_fsdp.local_fraction(model)
    # Parameters are split by rows, so a rank can hold a little more or less than its part
    share = expected if abs(held - expected) <= SHARE_TOLERANCE * expected else held
    where = f"{held:.2%} of them are on rank {rank()}"
    return AuditedKnob("local parameter share", round(expected, 4), round(share, 4), where)


def deepspeed_banner(engine: Any) -> str:
    line = "=" * 60
    stage = int(engine.zero_optimization_stage())
    return "\n".join(
        [
            line,
            f"DeepSpeed ZeRO-{stage} Initialization Complete",
            line,
            f"  ZeRO Stage: {stage}",
            f"  Parameter offloading: {bool(parameter_partitions(engine))}",
            f"  Optimizer offloading: {bool(optimizer_partitions(engine))}",
            f"  Global rank: {engine.global_rank}",
            f"  World size: {engine.world_size}",
            f"  Device: {engine.device}",
            line,
        ]
    )


def audit_table(knobs: list[AuditedKnob]) -> str:
    """Return the audit as aligned text, one knob per line."""
    rows = [
        ("knob", "requested", "effective", ""),
        *((k.name, k.requested, k.effective, k.note) for k in knobs),
    ]
    widths = [max(len(str(row[column])) for row in rows) for column in range(3)]
    lines = ["  ".join(str(cell).ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in ["", *lines, ""])


# 2. The values that take effect, read from the live Trainer, the DeepSpeed engine and the wrapped model. `engine` is
#    None without DeepSpeed. distributed/inspect_fsdp.py reads the values of FSDP


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


def label_mode(dataset: Dataset, collator: DataCollatorForSeq2Seq) -> str:
    """Return the label mode, read from the labels: it decides which tokens count in the loss."""
    if IGNORED in dataset[0]["labels"]:  # the tokens of a prompt
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
