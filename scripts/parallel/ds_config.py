"""Checks of a DeepSpeed JSON file that DeepSpeed itself makes late, or not at all.

DeepSpeed ignores a misspelt key at the top level and in sections that it reads by hand; the sections below
that are classes come from the installed DeepSpeed, so their keys and types are always its own.
"""

import difflib
import inspect
import re

from pydantic import BaseModel, ValidationError

from build_ops import prepare_deepspeed
from errors import WorkshopError
from json_files import read_json

LARGEST = 1e18  # of any number: above it a sum or a conversion overflows
# https://www.deepspeed.ai/docs/config-json/ : sections that DeepSpeed reads key by key
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
NUMBER = (int, float)
SWITCH = (bool,)
TEXT = (str,)
PAIR = (list,)
IN_WORDS: dict[tuple[type, ...], str] = {
    NUMBER: "a number of at least 0",
    SWITCH: "true or false",
    TEXT: "a text",
    PAIR: "two numbers below 1",
}
OPTIMIZER_PARAMS = {
    "lr": NUMBER,
    "betas": PAIR,
    "eps": NUMBER,
    "weight_decay": NUMBER,
    "bias_correction": SWITCH,
    "adam_w_mode": SWITCH,
    "torch_adam": SWITCH,
    "amsgrad": SWITCH,
}
PLAIN_KEYS = {
    "train_batch_size": NUMBER,
    "train_micro_batch_size_per_gpu": NUMBER,
    "gradient_accumulation_steps": NUMBER,
    "gradient_clipping": NUMBER,
    "steps_per_print": NUMBER,
    "wall_clock_breakdown": SWITCH,
    "memory_breakdown": SWITCH,
    "dump_state": SWITCH,
    "communication_data_type": TEXT,
    "prescale_gradients": SWITCH,
    "gradient_predivide_factor": NUMBER,
    "gradient_allreduce_op": TEXT,
    "disable_allgather": SWITCH,
    "disable_python_gc": SWITCH,
    "zero_allow_untested_optimizer": SWITCH,
    "zero_force_ds_cpu_optimizer": SWITCH,
    "log_level": TEXT,
}
# By these something is divided
MORE_THAN_ZERO = ("steps_per_print", "gradient_predivide_factor")
# Keys for which the Trainer replaces "auto", with the flag that they follow. Without the key DeepSpeed would
# take a default of its own instead of the flag (lr 0.001, no clipping), so those marked True must be there.
FLAGS = {
    "train_batch_size": ("micro batch x accumulation x ranks", False),
    "train_micro_batch_size_per_gpu": ("--per_device_train_batch_size", False),
    "gradient_accumulation_steps": ("--gradient_accumulation_steps", False),
    "gradient_clipping": ("--max_grad_norm", True),
    "optimizer.params.lr": ("--learning_rate", True),
    "optimizer.params.betas": ("--adam_beta1 and --adam_beta2", True),
    "optimizer.params.eps": ("--adam_epsilon", True),
    "optimizer.params.weight_decay": ("--weight_decay", True),
    "scheduler.params.warmup_min_lr": ("", False),
    "scheduler.params.warmup_max_lr": ("--learning_rate", True),
    "scheduler.params.warmup_num_steps": ("--warmup_steps", True),
    "scheduler.params.total_num_steps": ("the number of training steps", True),
    "fp16.enabled": ("--fp16", False),
    "bf16.enabled": ("--bf16", False),
    "zero_optimization.reduce_bucket_size": ("", False),
    "zero_optimization.stage3_prefetch_bucket_size": ("", False),
    "zero_optimization.stage3_param_persistence_threshold": ("", False),
}
GATHER = "stage3_gather_16bit_weights_on_model_save"


def check_ds_config(path: str) -> dict:
    """The content of a DeepSpeed config file for the Hugging Face Trainer, ``"auto"`` values in place.

    Raises WorkshopError (exit code 2) with the file and the dotted path of the first key that is unknown or wrong.
    """
    config = read_json(path)
    check_numbers(path, "", config)
    prepare_deepspeed()
    sections = section_models()
    known = [*PLAIN_KEYS, *PLAIN_SECTIONS, *sections]
    for key, value in config.items():
        check_key(path, key, key, known)
        if key in PLAIN_KEYS:
            check_plain_value(path, key, value, PLAIN_KEYS[key])
            continue
        if not isinstance(value, dict):
            way_out = "see https://www.deepspeed.ai/docs/config-json/"
            raise WorkshopError(f"{path}: {key}", f"is {value!r}, expected an object", way_out)
        if key in sections:
            check_section(path, key, value, sections[key])
        else:
            for name in value:
                check_key(path, f"{key}.{name}", name, PLAIN_SECTIONS[key].split())
    check_optimizer(path, config.get("optimizer", {}))
    check_scheduler(path, config.get("scheduler", {}))
    check_auto(path, "", config)
    require(path, "gradient_clipping", config)
    zero = config.setdefault("zero_optimization", {})
    for key, part, lowest in (("offload_optimizer", "the optimizer", 1), ("offload_param", "parameters", 3)):
        if zero.get(key) and zero.get("stage", 0) < lowest:
            what = f"stage {zero.get('stage', 0)} does not shard {part}, so it cannot offload"
            raise WorkshopError(
                f"{path}: zero_optimization.{key}", what, f"set the stage to at least {lowest} or remove the key"
            )
    return config


def section_models() -> dict[str, type[BaseModel]]:
    """Sections that DeepSpeed itself describes with a pydantic class."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
    }


def check_numbers(path: str, prefix: str, section: dict) -> None:
    """Refuse NaN, infinity, and what is too large for a machine's number."""
    for key, value in section.items():
        if isinstance(value, dict):
            check_numbers(path, f"{prefix}{key}.", value)
        numbers = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int | float)]
        if not all(-LARGEST <= number <= LARGEST for number in numbers):
            raise WorkshopError(f"{path}: {prefix}{key}", "is out of range", "correct the value")


def check_plain_value(path: str, dotted: str, value: object, kind: tuple[type, ...]) -> None:
    if value == "auto":
        return
    fits = isinstance(value, kind) and (kind == SWITCH or not isinstance(value, bool))
    if isinstance(value, int | float) and kind == NUMBER:
        fits = fits and value >= 0 and (value > 0 or dotted not in MORE_THAN_ZERO)
    if isinstance(value, list):
        fits = len(value) == 2 and all(type(each) in NUMBER and 0 <= each < 1 for each in value)
    if not fits:
        raise WorkshopError(f"{path}: {dotted}", f"is {value!r:.60}, expected {IN_WORDS[kind]}", "correct the value")


def check_section(path: str, name: str, section: dict, model: type[BaseModel]) -> None:
    stage = section.get("stage", 0)
    if name == "zero_optimization" and (type(stage) is not int or stage not in (0, 1, 2, 3)):
        raise WorkshopError(f"{path}: {name}.stage", f"is {section['stage']!r}", "ZeRO has the stages 0, 1, 2 and 3")
    check_keys(path, name, section, model)
    try:
        model(**without_auto(section))
    except ValidationError as error:
        first = error.errors()[0]
        dotted = ".".join(str(part) for part in (name, *first["loc"]))
        raise WorkshopError(
            f"{path}: {dotted}", f"is {first['input']!r}: {first['msg']}", "correct the value"
        ) from error
    except (AssertionError, TypeError, ArithmeticError) as error:
        raise WorkshopError(f"{path}: {name}", str(error), "correct it") from error


def check_keys(path: str, name: str, section: dict, model: type[BaseModel]) -> None:
    fields = dict(model.model_fields)
    fields.update({info.alias: info for info in model.model_fields.values() if info.alias})
    for key, value in section.items():
        check_key(path, f"{name}.{key}", key, list(fields))
        replaced = fields[key].json_schema_extra
        if isinstance(replaced, dict) and replaced.get("deprecated"):
            raise WorkshopError(f"{path}: {name}.{key}", "deprecated by DeepSpeed", f"use {replaced['new_param']}")
        if isinstance(value, dict):
            annotation = fields[key].annotation
            kinds = getattr(annotation, "__args__", None) or [annotation]  # Optional[Model] or Model
            models = [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel)]
            if models:
                check_keys(path, f"{name}.{key}", value, models[0])


def check_key(path: str, dotted: str, key: str, known: list[str]) -> None:
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        way_out = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known)):.300}"
        raise WorkshopError(f"{path}: {dotted}", "unknown key", way_out)


def without_auto(section: dict) -> dict:
    return {
        key: without_auto(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if value != "auto"
    }


def check_auto(path: str, prefix: str, section: dict) -> None:
    """Refuse "auto" where nobody replaces it: DeepSpeed would meet the word itself."""
    for key, value in section.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict):
            check_auto(path, f"{dotted}.", value)
        elif value == "auto" and dotted not in FLAGS:
            raise WorkshopError(
                f"{path}: {dotted}", 'is "auto", which no flag replaces here', "give a value or remove the key"
            )


def require(path: str, dotted: str, holder: dict) -> None:
    key = dotted.split(".")[-1]
    flag, required = FLAGS[dotted]
    if required and key not in holder:
        raise WorkshopError(f"{path}: {dotted}", f"is missing, so {flag} would have no effect", f'add "{key}": "auto"')


def params(path: str, name: str, section: dict, known: list[str]) -> dict:
    """The checked `params` of the optimizer or the scheduler."""
    values = section.get("params", {})
    if not isinstance(values, dict):
        raise WorkshopError(
            f"{path}: {name}.params", f"is {values!r}, expected an object", "see ds_configs/ for examples"
        )
    for key in values:
        check_key(path, f"{name}.params.{key}", key, known)
    for key in known:
        if f"{name}.params.{key}" in FLAGS:
            require(path, f"{name}.params.{key}", values)
    return values


def check_optimizer(path: str, optimizer: dict) -> None:
    if not optimizer:
        return
    if optimizer.get("type") not in ("Adam", "AdamW"):
        way_out = "use AdamW, or remove the section and choose with --optim"
        raise WorkshopError(f"{path}: optimizer.type", f"is {optimizer.get('type')!r}", way_out)
    for key, value in params(path, "optimizer", optimizer, list(OPTIMIZER_PARAMS)).items():
        check_plain_value(path, f"optimizer.params.{key}", value, OPTIMIZER_PARAMS[key])


def check_scheduler(path: str, scheduler: dict) -> None:
    if not scheduler:
        return
    from deepspeed.runtime import lr_schedules

    name = scheduler.get("type")
    if not isinstance(name, str) or name not in lr_schedules.VALID_LR_SCHEDULES:
        listed = ", ".join(lr_schedules.VALID_LR_SCHEDULES)
        raise WorkshopError(f"{path}: scheduler.type", f"is {name!r}", f"DeepSpeed has {listed}")
    known = list(inspect.signature(getattr(lr_schedules, name)).parameters)
    values = params(path, "scheduler", scheduler, known)
    # Only the Trainer knows the length of the training, and it stops late at a literal that differs
    for key in {"warmup_num_steps", "total_num_steps"} & values.keys():
        if values[key] != "auto":
            flag = FLAGS[f"scheduler.params.{key}"][0]
            raise WorkshopError(
                f"{path}: scheduler.params.{key}", f"is {values[key]!r}", f'set it to "auto", it follows {flag}'
            )


def offloaded(zero: dict, part: str) -> bool:
    return (zero.get(f"offload_{part}") or {}).get("device", "none") != "none"


def check_contradictions(path: str, config: dict, training_args, names: dict) -> None:
    """Compare the file's literals with the flags, once TrainingArguments has met both.

    names: flag -> how the user gave it. Raises WorkshopError (exit code 2) with both values of the first contradiction.
    """
    for section, flag in (("optimizer", "optim"), ("scheduler", "lr_scheduler_type")):
        choice = getattr(training_args, flag).value
        if section in config and flag in names and choice not in ("adamw_torch", "adamw_torch_fused"):
            both = f"{section}.type is {config[section]['type']}, but {names[flag]} is {choice}"
            raise WorkshopError(path, both, f"remove the section {section} or the flag")
    for line in training_args.hf_deepspeed_config.mismatches:  # "- ds KEY=VALUE vs hf NAME=VALUE"
        found = re.fullmatch(r"- ds ([\w.]+)=(.*) vs hf .*?=(.*)", line, re.DOTALL)
        assert found, line
        dotted, value, given = found.groups()
        flag, _ = FLAGS[dotted]
        flag = names.get(flag.removeprefix("--"), flag)
        raise WorkshopError(path, f"{dotted} is {value}, but {flag} is {given}", 'set it to "auto" or change the flag')
    zero = config["zero_optimization"]
    if zero.get("stage") == 3 and not zero.get(GATHER) and training_args.save_strategy != "no":
        raise WorkshopError(
            f"{path}: zero_optimization.{GATHER}", "is not true, so no weights would be saved", "set it to true"
        )
