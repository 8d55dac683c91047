"""Checks of a DeepSpeed config file, made before the model is loaded. DeepSpeed makes them later or not at all.

DeepSpeed ignores a misspelt key at the top level and in sections that it reads key by key. It has classes that check
the other sections, such as zero_optimization. This module uses these classes.
"""

from typing import Any

from pydantic import BaseModel, ValidationError
from transformers import TrainingArguments

from distributed.process_group import prepare_deepspeed
from settings.optimizers import ADAMW, SHARDABLE, algorithm, choose_optimizer
from settings.settings import Settings
from shared.errors import WorkshopError, did_you_mean
from shared.json_files import flatten_keys, read_json

# https://www.deepspeed.ai/docs/config-json/
TOP_LEVEL = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "communication_data_type"),
    *("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "disable_allgather"),
    *("disable_python_gc", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "log_level"),
)
# Sections that DeepSpeed reads key by key
PLAIN_SECTIONS = {
    "activation_checkpointing": "partition_activations contiguous_memory_optimization cpu_checkpointing"
    " number_checkpoints profile synchronize_checkpoint_boundary",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
}
# Sections that the workshop does not use; DeepSpeed checks them when its engine starts
LEFT_TO_DEEPSPEED = ("comms_logger", "tensorboard", "wandb", "csv_monitor", "comet")
# If one of these keys is missing, DeepSpeed uses its own default (lr 0.001, no clipping), and the flag has no effect
NEEDED_ALWAYS = {"gradient_clipping": "--max_grad_norm"}
NEEDED_BY_OPTIMIZER = {
    "optimizer.params.lr": "--learning_rate",
    "optimizer.params.betas": "--adam_beta1 and --adam_beta2",
    "optimizer.params.eps": "--adam_epsilon",
    "optimizer.params.weight_decay": "--weight_decay",
}
NEEDED_BY_WARM_UP = {
    "scheduler.params.warmup_max_lr": "--learning_rate",
    "scheduler.params.warmup_num_steps": "--warmup_steps",
}
# Keys for which the Trainer replaces "auto" by a value
AUTO = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("fp16.enabled", "bf16.enabled", "scheduler.params.warmup_min_lr", "scheduler.params.total_num_steps"),
    *("zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
    "zero_optimization.stage3_param_persistence_threshold",
    *(NEEDED_ALWAYS | NEEDED_BY_OPTIMIZER | NEEDED_BY_WARM_UP),
)
OFFLOAD_KEYS = ("device", "pin_memory", "nvme_path", "ratio")  # used only to suggest the right key for a misspelt one
GATHER = "stage3_gather_16bit_weights_on_model_save"


def check_ds_config(path: str) -> dict:
    """Check a DeepSpeed config file and return its content. The Trainer replaces the ``"auto"`` values.

    Raises WorkshopError (exit code 2) with the file and the dotted path of the first key that is unknown or wrong.
    """
    config = read_json(path)
    prepare_deepspeed()
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    # DeepSpeed's pydantic classes for these sections reject unknown keys
    models = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}
    for key, section in config.items():
        check_ds_key(path, key, [*TOP_LEVEL, *PLAIN_SECTIONS, *models, *LEFT_TO_DEEPSPEED])
        if key in TOP_LEVEL or key in LEFT_TO_DEEPSPEED:
            continue
        if not isinstance(section, dict):
            raise WorkshopError(f"{path}: {key}", f"is {section!r}, not an object", "see ds_configs/ for examples")
        if key == "zero_optimization":
            check_stage(path, section)
        if key in models:
            check_section(path, key, section, models[key])
        else:
            for name in section:
                check_ds_key(path, f"{key}.{name}", PLAIN_SECTIONS[key].split())
    config.setdefault("zero_optimization", {})
    leaves = flatten_keys(config)
    for dotted, value in leaves.items():
        if value == "auto" and dotted not in AUTO:  # DeepSpeed would use the word "auto" as the value
            what = 'is "auto", but no flag gives a value for this key'
            raise WorkshopError(f"{path}: {dotted}", what, "give a value or remove the key")
    check_required(path, config, leaves)
    return config


def check_ds_key(path: str, dotted: str, known: list[str]) -> None:
    key = dotted.split(".")[-1]
    if key not in known:
        remedy = did_you_mean(key, known, "see https://www.deepspeed.ai/docs/config-json/")
        raise WorkshopError(f"{path}: {dotted}", "unknown key", remedy)


def check_section(path: str, name: str, section: dict, model: type[BaseModel]) -> None:
    try:
        model(**{key: value for key, value in section.items() if value != "auto"})
    except ValidationError as error:
        first = error.errors()[0]
        dotted = ".".join([name, *map(str, first["loc"])])
        if first["type"] == "extra_forbidden":
            known = [info.alias or key for key, info in model.model_fields.items()]
            check_ds_key(path, dotted, [*known, *OFFLOAD_KEYS])
        raise WorkshopError(f"{path}: {dotted}", f"is {first['input']!r}: {first['msg']}", "correct it") from error


def check_stage(path: str, zero: dict) -> None:
    """Reject an unknown or quoted stage, and offload of a part that the stage does not shard.

    With a quoted stage, transformers does not shard while it loads the model. DeepSpeed silently ignores offload of a
    part that the stage does not shard.
    """
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise WorkshopError(f"{path}: zero_optimization.stage", f"is {stage!r}", "give 0, 1, 2 or 3")
    for key, part, lowest in (("offload_optimizer", "the optimizer", 1), ("offload_param", "parameters", 3)):
        if zero.get(key) and stage < lowest:
            what = f"stage {stage} does not shard {part}, so it cannot offload"
            remedy = f"set the stage to at least {lowest} or remove the key"
            raise WorkshopError(f"{path}: zero_optimization.{key}", what, remedy)


def check_required(path: str, config: dict, leaves: dict) -> None:
    """Reject a file that lacks a key for a flag: DeepSpeed would silently ignore the flag."""
    required = dict(NEEDED_ALWAYS)
    if "optimizer" in config:
        if config["optimizer"].get("type") not in ("Adam", "AdamW"):
            remedy = "use AdamW, or remove the section and choose with --optim"
            raise WorkshopError(f"{path}: optimizer.type", f"is {config['optimizer'].get('type')!r}", remedy)
        check_adamw(path, config["optimizer"].get("params", {}), config["zero_optimization"])
        required |= NEEDED_BY_OPTIMIZER
    if config.get("scheduler", {}).get("type") in ("WarmupLR", "WarmupDecayLR"):
        required |= NEEDED_BY_WARM_UP
    for dotted, flag in required.items():
        if dotted not in leaves:
            what = f"is missing, so {flag} would have no effect"
            raise WorkshopError(f"{path}: {dotted}", what, f'add "{dotted.split(".")[-1]}": "auto"')


def check_adamw(path: str, params: dict, zero: dict) -> None:
    """Reject parameters that the chosen AdamW, PyTorch's or DeepSpeed's, does not support."""
    if params.get("fused") and not params.get("torch_adam"):
        remedy = "add torch_adam, or remove fused"
        raise WorkshopError(f"{path}: optimizer.params.fused", "DeepSpeed's own AdamW has no such key", remedy)
    if params.get("torch_adam") and (zero.get("offload_optimizer") or {}).get("ratio", 1) < 1:
        what = "only DeepSpeed's own AdamW can update a part on the CPU"
        remedy = "remove torch_adam and fused from optimizer.params, or remove ratio"
        raise WorkshopError(f"{path}: zero_optimization.offload_optimizer.ratio", what, remedy)


def offloaded(zero: dict, part: str) -> bool:
    return (zero.get(f"offload_{part}") or {}).get("device", "none") != "none"


def check_choices(settings: Settings) -> None:
    """Reject an optimizer or a schedule that is chosen twice, and an optimizer that cannot be sharded.

    Raises WorkshopError (exit code 2).
    """
    path = settings.trainer.deepspeed
    config = settings.deepspeed_config or {}
    names = settings.names
    flags = settings.flat()
    for section, flag in (("optimizer", "optim"), ("scheduler", "lr_scheduler_type")):
        choice = str(flags[flag])
        if section in config and flag in names and algorithm(choice) != ADAMW.algorithm:
            both = f"{section}.type is {config[section]['type']}, but {names[flag]} is {choice}"
            raise WorkshopError(path, both, f"remove the section {section} or the flag")
    if settings.zero.get("stage") and not choose_optimizer(settings).shardable:
        raise settings.error("optim", f"{settings.trainer.optim} cannot update shards", f"use one of {SHARDABLE}")


def check_contradictions(settings: Settings, training_args: TrainingArguments) -> None:
    """Reject values in the file that contradict the flags. `training_args` was built from both.

    Raises WorkshopError (exit code 2) with both values of each contradiction.
    """
    path = settings.trainer.deepspeed
    deepspeed: Any = training_args.hf_deepspeed_config
    if deepspeed.mismatches:  # "- ds KEY=VALUE vs hf FLAG=VALUE"
        both = ", ".join(line.removeprefix("- ") for line in deepspeed.mismatches)
        raise WorkshopError(path, f"contradicts the flags: {both}", 'set it to "auto" or change the flag')
    zero = settings.zero
    if zero.get("stage") == 3 and not zero.get(GATHER) and training_args.save_strategy != "no":
        what = "is not true, so no weights would be saved"
        raise WorkshopError(f"{path}: zero_optimization.{GATHER}", what, "set it to true")
