"""Checks of an FSDP config file, and FSDP on the CPU.

transformers silently ignores an unknown key of the file: here it is an error. On the CPU accelerate silently runs DDP
instead of FSDP: shard_on_cpu corrects this.
"""

import json

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, ParallelismConfig

from settings.settings import Settings
from shared.errors import ENVIRONMENT, WorkshopError, did_you_mean
from shared.json_files import read_json

SWITCH = (True, False)
# Each key with its allowed values or their type:
# https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments, key fsdp_config
COMMON_KEYS = {
    "version": (1, 2),
    "cpu_offload": SWITCH,
    "activation_checkpointing": SWITCH,
    "cpu_ram_efficient_loading": SWITCH,
    "state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "transformer_layer_cls_to_wrap": list,
    "min_num_params": int,
}
# The dp_* keys belong to this workshop; resolve_sizes checks them
FSDP2_KEYS = {"reshard_after_forward": SWITCH, "dp_shard_size": object, "dp_replicate_size": object}
FSDP1_KEYS = {
    # The workshop uses FSDP1 only for comparison with FSDP2, so two strategies are enough
    "reshard_after_forward": ("full_shard", "shard_grad_op"),
    "backward_prefetch": ("backward_pre", "backward_post", "no_prefetch"),
    "forward_prefetch": SWITCH,
    "sync_module_states": SWITCH,
    "use_orig_params": SWITCH,
    "limit_all_gathers": SWITCH,
}
# Keys that a file may have together with tensor parallelism, each with its only allowed value
TENSOR_PARALLEL_VALUES = {
    "version": 2,
    "reshard_after_forward": True,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "state_dict_type": "FULL_STATE_DICT",
    "cpu_offload": False,
    "activation_checkpointing": False,
}
EXPECTED = {list: "a list of class names", int: "a whole number"}


def check_fsdp_config(settings: Settings, ranks: int, ranks_per_node: int) -> dict:
    """Check the file of --fsdp_config and return its content, with dp_shard_size and dp_replicate_size as numbers.

    Without a file the strategy is FSDP2 FULL_SHARD. ranks, ranks_per_node: with tensor parallelism, numbers of tensor
    groups. Raises WorkshopError (exit code 2) with the file and key at fault.
    """
    fsdp = settings.trainer.fsdp
    if str(fsdp).lower() != "true":
        remedy = "use --fsdp --fsdp_config with a file of fsdp_configs/"
        raise WorkshopError("--fsdp", f"{fsdp!r} is a deprecated form", remedy)
    config = check_fsdp_file(settings)
    resolve_sizes(settings.trainer.fsdp_config or "--fsdp", config, ranks, ranks_per_node)
    return config


def check_device(settings: Settings) -> None:
    """Raise WorkshopError (exit code 3) for an FSDP config that needs a GPU, on a machine without one."""
    config = settings.fsdp_config or {}
    source = settings.trainer.fsdp_config or "--fsdp"
    if not torch.cuda.is_available():
        if config.get("version") == 1:
            raise WorkshopError(source, "FSDP1 needs a GPU: it crashes with gloo", "use an FSDP2 config", ENVIRONMENT)
        if config.get("cpu_offload"):
            raise WorkshopError(source, "cpu_offload needs a GPU to offload from", "use another config", ENVIRONMENT)


def check_fsdp_file(settings: Settings) -> dict:
    """Check the keys and values of the file of --fsdp_config and return its content, which is empty without a file.

    Raises WorkshopError (exit code 2) for a key or value that is unknown or does not work with another flag.
    """
    path = settings.trainer.fsdp_config
    if not path:
        return {}
    tensor_parallel = settings.model.tensor_parallel
    config = read_json(path)
    if settings.model.lora_rank and config.get("version") == 1:
        raise WorkshopError(f"{path}: version", "FSDP1 has not been tried with --lora_rank", "use an FSDP2 config")
    for key, value in config.items():
        check_fsdp_key(path, key, value, COMMON_KEYS | (FSDP1_KEYS if config.get("version") == 1 else FSDP2_KEYS))
        if tensor_parallel > 1 and value != TENSOR_PARALLEL_VALUES.get(key, "unknown"):
            allowed = json.dumps(TENSOR_PARALLEL_VALUES.get(key))
            remedy = f"give {allowed}, or leave it out" if key in TENSOR_PARALLEL_VALUES else "leave it out"
            what = f"{json.dumps(value)} cannot be combined with --tensor_parallel"
            raise WorkshopError(f"{path}: {key}", what, remedy)
    return config


def check_fsdp_key(source: str, key: str, value: object, known: dict) -> None:
    if key not in known and key in FSDP1_KEYS:
        raise WorkshopError(f"{source}: {key}", "FSDP2 has no such key", 'remove it, or set "version": 1')
    if key not in known:
        remedy = did_you_mean(key.removeprefix("fsdp_"), known, "see fsdp_configs/ for examples")
        raise WorkshopError(f"{source}: {key}", "unknown key", remedy)
    kind = known[key]
    if isinstance(kind, tuple) and value not in kind:
        raise WorkshopError(f"{source}: {key}", f"is {value!r}", f"give {' or '.join(map(json.dumps, kind))}")
    if isinstance(kind, type) and not isinstance(value, kind):
        raise WorkshopError(f"{source}: {key}", f"is {value!r}", f"give {EXPECTED[kind]}")


def resolve_sizes(source: str, config: dict, ranks: int, ranks_per_node: int) -> None:
    """Set each of dp_shard_size and dp_replicate_size that is "auto" or missing. Their product must be `ranks`."""
    shard = config.get("dp_shard_size", "auto")
    replicate = config.get("dp_replicate_size", "auto")
    for key, size in (("dp_shard_size", shard), ("dp_replicate_size", replicate)):
        if size != "auto" and not (isinstance(size, int) and size > 0):
            raise WorkshopError(f"{source}: {key}", f"is {size!r}", 'give "auto" or a whole number above 0')
    if shard == replicate == "auto":
        # HYBRID_SHARD shards within a node and replicates between nodes. Otherwise shard once over all ranks
        hybrid = "dp_shard_size" in config or "dp_replicate_size" in config
        shard = ranks_per_node if hybrid else ranks
    if shard == "auto":
        shard = ranks // replicate
    if replicate == "auto":
        replicate = ranks // shard
    if shard * replicate != ranks:
        what = f"dp_shard_size {shard} x dp_replicate_size {replicate} is not the world size {ranks}"
        raise WorkshopError(source, what, "start shard x replicate ranks, or set both to auto")
    if shard == 1 and replicate > 1:
        # accelerate would raise a ValueError only later, when the Trainer creates its Accelerator
        what = f"dp_shard_size 1 leaves nothing to shard (ranks per node: {ranks_per_node})"
        raise WorkshopError(source, what, "use fsdp_configs/full_shard.json, which shards over all ranks")
    config |= {"dp_shard_size": shard, "dp_replicate_size": replicate}


def parallelism(config: dict | None) -> ParallelismConfig | None:
    """Return the two mesh dimensions of HYBRID_SHARD, None for all other strategies."""
    if config is None or config.get("dp_replicate_size", 1) == 1:
        return None
    return ParallelismConfig(dp_replicate_size=config["dp_replicate_size"], dp_shard_size=config["dp_shard_size"])


def check_wrap_classes(config: dict, path: str | None, model: torch.nn.Module) -> None:
    """Reject a class to wrap that the model does not have.

    Raises WorkshopError (exit code 2) with the classes that the model has.
    """
    classes = {type(module).__name__ for module in model.modules()}
    for name in wrap_classes(config, model):
        if name not in classes:
            listed = ", ".join(sorted(classes))
            key = f"{path}: transformer_layer_cls_to_wrap"
            raise WorkshopError(key, f"the model has no {name}", f"choose from {listed}")


def wrap_classes(config: dict, model: object) -> list[str]:
    """Return the names of the classes that FSDP wraps as units: by default the model's blocks.

    model: a transformers model, or any object with the attribute `_no_split_modules`.
    """
    if config.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP") != "TRANSFORMER_BASED_WRAP":
        return []
    return config.get("transformer_layer_cls_to_wrap") or list(getattr(model, "_no_split_modules", None) or [])


def shard_on_cpu() -> None:
    """Let accelerate shard over gloo. Without this it silently runs DDP, because it uses FSDP only with several GPUs.

    Call this just before the Trainer creates its Accelerator.
    """
    if not torch.cuda.is_available():
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
