"""Checks of a DeepSpeed JSON file that DeepSpeed itself makes late, or not at all.

DeepSpeed ignores a misspelt key at the top level and in sections that it reads by hand; the sections below
that are classes come from the installed DeepSpeed, so their keys and types are always its own.
"""

import difflib
import inspect
import json
from pathlib import Path

from errors import fail
from pydantic import BaseModel, ValidationError

OPTIMIZER_PARAMS = [
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "bias_correction",
    "adam_w_mode",
    "torch_adam",
    "amsgrad",
]
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
PLAIN_KEYS = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "disable_allgather",
    "disable_python_gc",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "log_level",
]


def check_ds_config(path: str) -> dict:
    """The content of a DeepSpeed config file for the Hugging Face Trainer, ``"auto"`` values in place.

    Raises SystemExit(2) with the file and the dotted path of the first key that is unknown or wrong.
    """
    config = read_json(path)
    sections = section_models()
    known = [*PLAIN_KEYS, *PLAIN_SECTIONS, *sections]
    for key, value in config.items():
        check_key(path, key, key, known)
        if key in PLAIN_KEYS:
            continue
        if not isinstance(value, dict):
            fail(
                f"{path}: {key}",
                f"is {value!r}, expected an object",
                "see https://www.deepspeed.ai/docs/config-json/",
            )
        if key in sections:
            check_section(path, key, value, sections[key])
        else:
            for name in value:
                check_key(path, f"{key}.{name}", name, PLAIN_SECTIONS[key].split())
    check_optimizer(path, config.get("optimizer", {}))
    check_scheduler(path, config.get("scheduler", {}))
    zero = config.get("zero_optimization", {})
    if "offload_param" in zero and zero.get("stage") != 3:
        fail(
            f"{path}: zero_optimization.offload_param",
            "only stage 3 shards parameters, so only it can offload them",
            "set the stage to 3 or remove the key",
        )
    return config


def read_json(path: str) -> dict:
    """A JSON object from a file. Raises SystemExit(2) with line and column when it is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=lambda pairs: without_repeats(path, pairs))
    except json.JSONDecodeError as error:
        fail(path, f"line {error.lineno}, column {error.colno}: {error.msg}", "correct the JSON")
    except UnicodeDecodeError as error:
        fail(path, f"byte {error.start} is not UTF-8", "save the file as UTF-8")
    except OSError as error:
        fail(path, error.strerror or "cannot be read", "see ds_configs/ for the files that there are")
    if not isinstance(content, dict):
        fail(path, "is not a JSON object", "see ds_configs/ for examples")
    return content


def without_repeats(path: str, pairs: list[tuple]) -> dict:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            fail(f"{path}: {key}", "stands twice in one object", "remove one of them")
    return dict(pairs)


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


def check_section(path: str, place: str, section: dict, model: type[BaseModel]) -> None:
    if place == "zero_optimization" and section.get("stage", 0) not in (0, 1, 2, 3):
        fail(f"{path}: {place}.stage", f"is {section['stage']!r}", "ZeRO has the stages 0, 1, 2 and 3")
    check_keys(path, place, section, model)
    try:
        model(**without_auto(section))
    except ValidationError as error:
        first = error.errors()[0]
        dotted = ".".join(str(part) for part in (place, *first["loc"]))
        fail(f"{path}: {dotted}", f"is {first['input']!r}: {first['msg']}", "correct the value")
    except AssertionError as error:
        fail(f"{path}: {place}", str(error), "keep one of the two keys")


def check_keys(path: str, place: str, section: dict, model: type[BaseModel]) -> None:
    fields = dict(model.model_fields)
    fields.update({info.alias: info for info in model.model_fields.values() if info.alias})
    for key, value in section.items():
        check_key(path, f"{place}.{key}", key, list(fields))
        # Optional[Model] or Model
        models = [
            t
            for t in (getattr(fields[key].annotation, "__args__", None) or [fields[key].annotation])
            if inspect.isclass(t) and issubclass(t, BaseModel)
        ]
        if models and isinstance(value, dict):
            check_keys(path, f"{place}.{key}", value, models[0])


def check_key(path: str, dotted: str, key: str, known: list[str]) -> None:
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        way_out = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known)):.300}"
        fail(f"{path}: {dotted}", "unknown key", way_out)


def without_auto(section: dict) -> dict:
    return {
        key: without_auto(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if value != "auto"
    }


def check_optimizer(path: str, optimizer: dict) -> None:
    if not optimizer:
        return
    if optimizer.get("type") not in ("Adam", "AdamW"):
        way_out = "use AdamW, or remove the section and choose with --optim"
        fail(f"{path}: optimizer.type", f"is {optimizer.get('type')!r}", way_out)
    for key in optimizer.get("params", {}):
        check_key(path, f"optimizer.params.{key}", key, OPTIMIZER_PARAMS)


def check_scheduler(path: str, scheduler: dict) -> None:
    if not scheduler:
        return
    from deepspeed.runtime import lr_schedules

    name = scheduler.get("type")
    if name not in lr_schedules.VALID_LR_SCHEDULES:
        known = ", ".join(lr_schedules.VALID_LR_SCHEDULES)
        fail(f"{path}: scheduler.type", f"is {name!r}", f"DeepSpeed has {known}")
    parameters = list(inspect.signature(getattr(lr_schedules, name)).parameters)
    for key in scheduler.get("params", {}):
        check_key(path, f"scheduler.params.{key}", key, parameters)
