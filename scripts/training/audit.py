"""The knob audit: what was asked for against what runs, read from the live Trainer and DeepSpeed engine."""

from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import (
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
)
from transformers.training_args import OptimizerNames

from data_loader import IGNORED
from distributed import inspect_fsdp
from distributed.collectives import gather_lists, rank, world_size
from distributed.fsdp_config import wrap_classes
from distributed.strategy_names import effective_strategy, strategy_name
from distributed.tensor_parallel import cut_parameters
from model import count_parameters
from records.writer import RunRecord
from settings.command_line import Options, precision_name
from shared.errors import ENVIRONMENT, WorkshopError
from training import compiling
from training.bloom_sdpa import attention_of
from training.chunked_loss import computes_loss_in_head
from training.sampling import GroupByLengthSampler, sampler_of

NOT_ON_CPU = "n/a on CPU"
SHARE_TOLERANCE = 0.05


@dataclass
class Audited:
    """binding: whether what runs can be what was requested; if not, the difference is shown and the run goes on."""

    name: str
    requested: object
    effective: object
    note: str = ""
    binding: bool = True

    @property
    def differs(self) -> bool:
        return self.binding and self.requested != self.effective and self.effective != NOT_ON_CPU


class AuditCallback(TrainerCallback):
    """Prints and records the audit once the model is wrapped; ends the run with exit code 3 on a difference."""

    def __init__(self, trainer: Any, options: Options, record: RunRecord):
        self.trainer = trainer
        self.options = options
        self.record = record
        # before the model is wrapped: FSDP1 then shows each rank's share alone
        self.parameters = count_parameters(trainer.model)

    def on_train_begin(self, args, state, control, **kwargs):
        knobs = audit(self.trainer, self.options, self.parameters)
        if rank() == 0:
            print(audit_table(knobs), flush=True)
            if self.trainer.is_deepspeed_enabled:
                print(deepspeed_banner(self.trainer.model_wrapped), flush=True)
        self.record.update(
            knobs={k.name: {"requested": k.requested, "effective": k.effective} for k in knobs},
            parameters=self.parameters,
            steps_per_epoch=self.trainer.steps_per_epoch,
        )
        # of all ranks, so that all end with the same error: the others would wait for one that ends alone
        for number, differing in enumerate(gather_lists([knob for knob in knobs if knob.differs])):
            for knob in differing:
                where = f" on rank {number}" if number else ""
                what = f"{knob.requested} was requested, {knob.effective} is what would run{where}"
                raise WorkshopError(f"knob audit: {knob.name}", what, "correct the flag or the config", ENVIRONMENT)


def audit(trainer: Any, options: Options, parameters: int) -> list[Audited]:
    """One entry per knob, in the order of the printed table. trainer: a Trainer whose model is wrapped."""
    values = options.values
    engine = trainer.model_wrapped if trainer.is_deepspeed_enabled else None
    requested = strategy_name(options)
    strategy = effective_strategy(trainer, engine)
    alone = requested == "DDP" and world_size() == 1
    knobs = [
        Audited("precision", precision_name(values), effective_precision(trainer, engine), options.precision_note),
        # accelerate wraps a single rank on the CPU, and not on a GPU
        Audited("strategy", requested, strategy, "one rank averages with nobody" if alone else "", binding=not alone),
        optimizer_knob(trainer, engine, options),
    ]
    if engine is not None and options.deepspeed_config is not None:
        knobs += offload_knobs(engine, options.deepspeed_config.get("zero_optimization", {}))
    if strategy.startswith("FSDP") and options.fsdp_config is not None:
        knobs += fsdp_knobs(trainer, options.fsdp_config)
    if values["tensor_parallel"] > 1:
        knobs += tensor_parallel_knobs(trainer, values["tensor_parallel"])
    knobs += batch_knobs(trainer, engine, values)
    knobs += [
        Audited("label mode", values["labels"], labels_of(trainer.train_dataset, trainer.data_collator)),
        Audited("loss", values["loss"], "chunked" if computes_loss_in_head(trainer.model) else "full"),
        *speed_knobs(trainer, values),
    ]
    facts = {
        "padding": trainer.data_collator.padding,
        "train size": len(trainer.train_dataset),
        "eval size": len(trainer.eval_dataset),
        "steps per epoch": trainer.steps_per_epoch,
        "parameters": f"{parameters:,}",
        "device": str(trainer.args.device),
    }
    return knobs + [Audited(name, value, value) for name, value in facts.items()]


def batch_knobs(trainer: Any, engine, values: dict) -> list[Audited]:
    micro = values["per_device_train_batch_size"]
    accumulation = values["gradient_accumulation_steps"]
    live_micro, live_accumulation, live_groups = effective_batch(trainer, engine)
    tensor_parallel = values["tensor_parallel"]
    batch = micro * accumulation * world_size() // tensor_parallel
    live_batch = live_micro * live_accumulation * live_groups
    note = "micro batch x accumulation x " + ("world size" if tensor_parallel == 1 else "tensor groups")
    return [
        Audited("world size", world_size(), trainer.accelerator.num_processes, "ranks, one per GPU"),
        Audited("micro batch", micro, live_micro, "sequences per rank and step"),
        Audited("gradient accumulation", accumulation, live_accumulation),
        Audited("global batch", batch, live_batch, note),
    ]


def speed_knobs(trainer: Any, values: dict) -> list[Audited]:
    loader = trainer.callback_handler.train_dataloader
    compiled = compiling.is_compiled(trainer.model_wrapped)
    attention = attention_of(trainer.model)
    checkpointing = bool(values["activation_checkpointing"])
    return [
        Audited("attention", values["attention"] or attention, attention),
        Audited("sampling", values["train_sampling_strategy"], sampling_of(loader)),
        Audited("checkpointing", checkpointing, trainer.model.is_activation_checkpointing, "by the model itself"),
        Audited("compiled", bool(values["torch_compile"]), compiled),
    ]


def sampling_of(loader: Any) -> str:
    """Name of the order in which a DataLoader reads the questions."""
    names = {GroupByLengthSampler: "group_by_length", SequentialSampler: "sequential"}
    return names.get(type(sampler_of(loader)), "random")


def effective_precision(trainer: Trainer, engine) -> str:
    if engine is None:
        return {"no": "fp32"}.get(trainer.accelerator.mixed_precision, trainer.accelerator.mixed_precision)
    # after initialisation the module holds the working copy; the fp32 masters are the optimizer's
    dtypes = {p.dtype for p in engine.module.parameters()}
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    return "+".join(sorted(names.get(dtype, str(dtype)) for dtype in dtypes))


def effective_batch(trainer: Trainer, engine) -> tuple[int, int, int]:
    """Micro batch, accumulation, and how many ranks (of tensor groups: how many groups) have questions of their own."""
    groups = trainer.accelerator.num_processes // trainer.get_tp_size()
    if engine is not None:
        return engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(), groups
    loader = trainer.callback_handler.train_dataloader
    return loader.total_batch_size // groups, trainer.args.gradient_accumulation_steps, groups


def optimizer_knob(trainer: Any, engine, options: Options) -> Audited:
    """PyTorch's AdamW against --optim, or the keys of the DeepSpeed file; another optimizer is shown as it runs."""
    section = (options.deepspeed_config or {}).get("optimizer")
    if section is None:
        asked = OptimizerNames(options.values["optim"]).value
    elif section["params"].get("torch_adam") and section["params"].get("adam_w_mode", True):
        asked = "adamw_torch_fused" if section["params"].get("fused") else "adamw_torch"
    else:
        asked = ""
    effective = optimizer_name(trainer.optimizer.optimizer if engine is None else engine.basic_optimizer)
    names = {"adamw_torch_fused": "AdamW (torch, fused)", "adamw_torch": "AdamW (torch)"}
    return Audited("optimizer", names.get(asked, effective), effective)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Its class, whose it is, and whether one kernel steps many parameters: ``AdamW (torch, fused)``."""
    library = type(optimizer).__module__.split(".")[0]
    fused = ", fused" if optimizer.defaults.get("fused") else ""
    return f"{type(optimizer).__name__} ({library}{fused})"


def offload_knobs(engine, zero: dict) -> list[Audited]:
    """Where optimizer state and parameters live, and whether the buffers that `pin_memory` rules are pinned."""
    masters = optimizer_partitions(engine)
    buffers, note = optimizer_buffers(engine, masters)
    shares = parameter_partitions(engine)
    # partition_parameters.py pins by the key, but only until the optimizer is made: stage3.py then moves the shares
    # into buffers of its own, which it pins without asking (_create_param_groups_fp16_flat_cpu_memory)
    unasked = "DeepSpeed pins them in any case, once they are loaded"
    return [
        *offload_of("optimizer", zero.get("offload_optimizer"), masters, buffers, note),
        *offload_of("parameter", zero.get("offload_param"), shares, shares, unasked, binding=False),
    ]


def offload_of(
    part: str,
    section: dict | None,
    on_cpu: list[torch.Tensor],
    buffers: list[torch.Tensor],
    note: str,
    binding: bool = True,
) -> list[Audited]:
    """section: of the config file. buffers: those that its `pin_memory` rules; binding: whether it does rule them."""
    section = section or {}
    device = section.get("device", "none")
    offload = Audited(f"{part} offload", device, "cpu" if on_cpu else "none")
    if device == "none":
        return [offload]
    pin = section.get("pin_memory", True)
    return [offload, Audited(f"{part} pinned memory", pin, pinned(buffers), note, binding)]


def optimizer_buffers(engine, masters: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
    """What `offload_optimizer.pin_memory` rules, and what it does not.

    Stages 1 and 2 pin the fp32 masters and their gradients (stage_1_and_2.py); stage 3 the gradients alone (stage3.py,
    grad_partitions_flat_buffer). No stage pins Adam's moments: the optimizer makes them with zeros_like.
    """
    if masters and int(engine.zero_optimization_stage()) == 3:
        return [engine.optimizer.grad_partitions_flat_buffer], "gradients; masters and Adam's moments never are"
    gradients = [master.grad for master in masters if master.grad is not None]
    return [*masters, *gradients], "fp32 masters and gradients; Adam's moments never are"


def pinned(tensors: list[torch.Tensor]) -> object:
    from deepspeed.accelerator import get_accelerator

    if not can_pin():
        return NOT_ON_CPU
    return bool(tensors) and all(get_accelerator().is_pinned(t) for t in tensors)


def can_pin() -> bool:
    return torch.cuda.is_available()


def fsdp_knobs(trainer: Trainer, config: dict) -> list[Audited]:
    """Units, shares, offload and checkpointing of the model as FSDP has wrapped it."""
    model = trainer.model_wrapped
    names = wrap_classes(config, trainer.model)
    blocks = len(inspect_fsdp.modules_of(model, names))
    units = len(inspect_fsdp.sharded_blocks(model, names))
    expected = 1 / config["dp_shard_size"]
    held = inspect_fsdp.local_share(model)
    # parameters are split by rows, so small ones leave a rank a little more or less than its part
    share = expected if abs(held - expected) <= SHARE_TOLERANCE * expected else held
    checkpointed = blocks if config.get("activation_checkpointing") else 0
    others = ", ".join(inspect_fsdp.other_units(model, names))
    where = f"{held:.2%} of them are on rank {rank()}"
    mesh = f"{config['dp_replicate_size']} x {config['dp_shard_size']}"
    file_format = trainer.accelerator.state.fsdp_plugin.state_dict_type.name
    return [
        Audited("FSDP units", f"{blocks} blocks", f"{units} blocks", f"and {others}"),
        Audited("local parameter share", round(expected, 4), round(share, 4), where),
        Audited("mesh", mesh, inspect_fsdp.mesh_shape(model), "replicate x shard"),
        Audited("CPU offload", config.get("cpu_offload", False), inspect_fsdp.share_on_cpu(model)),
        Audited(
            "checkpointed blocks", checkpointed, inspect_fsdp.checkpointed_blocks(model), "activations are recomputed"
        ),
        Audited("checkpoint format", config.get("state_dict_type", "FULL_STATE_DICT"), file_format),
    ]


def tensor_parallel_knobs(trainer: Any, tensor_parallel: int) -> list[Audited]:
    """Groups, cut matrices, and the part of all parameters that this rank holds."""
    shards = world_size() // tensor_parallel
    mesh = inspect_fsdp.tensor_mesh(trainer.model)
    groups = f"{mesh.get('fsdp', 1)} x {mesh['tp']}"
    parameters = dict(trainer.model.named_parameters())
    names = cut_parameters(trainer.model)
    cut_here = [
        name for name in names if inspect_fsdp.local(parameters[name]).numel() < parameters[name].numel() / shards
    ]
    example = max(names, key=lambda name: parameters[name].numel())
    shapes = f"{tuple(inspect_fsdp.local(parameters[example]).shape)} of {tuple(parameters[example].shape)}"
    expected = sum(p.numel() / (tensor_parallel if name in names else 1) for name, p in parameters.items())
    expected /= shards * sum(p.numel() for p in parameters.values())
    held = inspect_fsdp.local_share(trainer.model)
    share = expected if abs(held - expected) <= SHARE_TOLERANCE * expected else held
    where = f"{held:.2%} of them are on rank {rank()}"
    return [
        Audited("mesh", f"{shards} x {tensor_parallel}", groups, "shards x ranks of a tensor group"),
        Audited("cut parameters", len(names), len(cut_here), f"{example}: {shapes} are on rank {rank()}"),
        Audited("local parameter share", round(expected, 4), round(share, 4), where),
    ]


def optimizer_partitions(engine) -> list[torch.Tensor]:
    """This rank's fp32 master weights if they are offloaded to the CPU, else an empty list."""
    optimizer = engine.optimizer
    offloaded = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
    masters = getattr(optimizer, "single_partition_of_fp32_groups", None) or getattr(
        optimizer, "fp32_partitioned_groups_flat", []
    )
    return [t for t in masters if t.device.type == "cpu"] if offloaded else []


def parameter_partitions(engine) -> list[torch.Tensor]:
    """This rank's shares of the parameters if ZeRO-3 keeps them in CPU memory, else an empty list."""
    if not getattr(engine.optimizer, "offload_param", False):
        return []
    shares = [p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor")]
    return [t for t in shares if t.device.type == "cpu"]


def labels_of(dataset: Dataset, collator: DataCollatorForSeq2Seq) -> str:
    """Which tokens count, from the labels themselves: the first belongs to the prompt."""
    if dataset[0]["labels"][0] == IGNORED:
        return "answer"
    return "sequence" if collator.label_pad_token_id == IGNORED else "all"


def deepspeed_banner(engine) -> str:
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


def audit_table(knobs: list[Audited]) -> str:
    """The audit as aligned text, one knob per line."""
    rows = [
        ("knob", "requested", "effective", ""),
        *((k.name, k.requested, k.effective, k.note) for k in knobs),
    ]
    widths = [max(len(str(row[column])) for row in rows) for column in range(3)]
    lines = ["  ".join(str(cell).ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in ["", *lines, ""])
