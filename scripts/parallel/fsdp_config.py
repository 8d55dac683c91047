"""FSDP: the config file, what it asks for by name, and real sharding on the CPU.

transformers ignores an unknown key of the file, and accelerate runs DDP instead of FSDP on the CPU, both without
a word. Here the first is an error and the second is put right.
"""

import difflib

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, ParallelismConfig

from errors import ENVIRONMENT, WorkshopError
from json_files import read_json

# https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments, key fsdp_config
BOTH = {
    "version": int,
    "cpu_offload": bool,
    "activation_checkpointing": bool,
    "cpu_ram_efficient_loading": bool,
    "state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "transformer_layer_cls_to_wrap": list,
    "min_num_params": int,
}
# dp_*: keys of this workshop; "auto" means the ranks of a node, and the nodes
FSDP2 = {"reshard_after_forward": bool, "dp_shard_size": "size", "dp_replicate_size": "size"}
FSDP1 = {
    "reshard_after_forward": ("full_shard", "shard_grad_op"),  # for the comparison; FSDP2 has all of them
    "backward_prefetch": ("backward_pre", "backward_post", "no_prefetch"),
    "forward_prefetch": bool,
    "sync_module_states": bool,
    "use_orig_params": bool,
    "limit_all_gathers": bool,
}
LARGEST = 2**31 - 1
OLD_STRATEGIES = {
    "full_shard": "full_shard",
    "shard_grad_op": "shard_grad_op",
    "hybrid_shard": "hybrid_shard",
    "offload": "full_shard_cpu_offload",
}


def check_fsdp_config(fsdp: object, path: str | None, ranks: int, ranks_per_node: int) -> dict:
    """The content of an FSDP config file (an empty one without a file: FSDP2 FULL_SHARD), sizes resolved.

    ranks, ranks_per_node: of the training, which for a check on a login node are not those of this process.
    Raises WorkshopError: exit code 2 with the file and key at fault, 3 for what this machine cannot run.
    """
    if str(fsdp).lower() != "true":
        words = str(fsdp).replace(",", " ").split()
        name = next((OLD_STRATEGIES[w] for w in reversed(words) if w in OLD_STRATEGIES), "full_shard")
        way_out = f"use --fsdp --fsdp_config fsdp_configs/{name}.json"
        raise WorkshopError("--fsdp", f"{fsdp!r} is a form that transformers removes", way_out)
    config = check_fsdp_file(path) if path else {}
    source = path or "--fsdp"
    resolve_sizes(source, config, ranks, ranks_per_node)
    if not torch.cuda.is_available():
        if config.get("version") == 1:
            raise WorkshopError(source, "FSDP1 needs a GPU, it crashes with gloo", "use an FSDP2 config", ENVIRONMENT)
        if config.get("cpu_offload"):
            raise WorkshopError(source, "cpu_offload needs a GPU to offload from", "use another config", ENVIRONMENT)
    if config.get("version") == 1 and ranks == 1:
        way_out = "start at least 2 ranks, or use fsdp_configs/full_shard.json"
        raise WorkshopError(source, "FSDP1 does not shard on one rank, it would run NO_SHARD", way_out)
    return config


def check_fsdp_file(path: str) -> dict:
    """The content of an FSDP config file. Raises WorkshopError (exit code 2) for a key or value that is unknown."""
    config = read_json(path)
    for key, value in config.items():
        check_key(path, key, value, BOTH | (FSDP1 if config.get("version") == 1 else FSDP2))
    return config


def check_key(source: str, key: str, value: object, known: dict) -> None:
    if key not in known:
        if key in FSDP1:
            raise WorkshopError(
                f"{source}: {key}", "FSDP2 has no such key, it prefetches by itself", 'remove it, or set "version": 1'
            )
        near = difflib.get_close_matches(key.removeprefix("fsdp_"), known, n=1)
        raise WorkshopError(
            f"{source}: {key}", "unknown key", f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        )
    kind = known[key]
    if isinstance(kind, tuple):
        valid = value in kind
        expected = " or ".join(kind)
    elif kind == "size":
        valid = value == "auto" or (type(value) is int and value > 0)
        expected = '"auto" or a whole number above 0'
    else:
        valid = type(value) is kind
        if isinstance(value, list):
            valid = valid and all(isinstance(name, str) for name in value)
        elif isinstance(value, int):
            valid = valid and 0 <= value <= LARGEST
        expected = {bool: "true or false", int: f"a whole number of at most {LARGEST}", list: "a list of class names"}[
            kind
        ]
    if key == "version":
        valid = type(value) is int and value in (1, 2)
        expected = "1 or 2"
    if not valid:
        raise WorkshopError(f"{source}: {key}", f"is {value!r}", f"give {expected}")


def resolve_sizes(source: str, config: dict, ranks: int, ranks_per_node: int) -> None:
    """Set dp_shard_size and dp_replicate_size, which may be "auto" or missing, and check them against the ranks."""
    shard = config.get("dp_shard_size", "auto")
    replicate = config.get("dp_replicate_size", "auto")
    if "dp_shard_size" not in config and "dp_replicate_size" not in config:
        shard = ranks  # FULL_SHARD and SHARD_GRAD_OP: one copy of the model over all ranks
        replicate = 1
    if shard == "auto" and replicate == "auto":
        shard = ranks_per_node  # shards travel within a node, gradients of replicas between nodes
    elif shard == "auto":
        shard = ranks // replicate
    if replicate == "auto":
        replicate = ranks // shard
    if shard * replicate != ranks:
        what = f"dp_shard_size {shard} x dp_replicate_size {replicate} is not the world size {ranks}"
        raise WorkshopError(source, what, "start shard x replicate ranks, or set both to auto")
    config |= {"dp_shard_size": shard, "dp_replicate_size": replicate}


def process_group_backend(config: dict, gpu: bool) -> str | None:
    """The back ends that training with this config needs, None for the library's choice.

    With cpu_offload gradients lie on the CPU when their norm is summed over the ranks, and NCCL knows no CPU tensors:
    "No backend type associated with device type cpu".
    """
    return "cuda:nccl,cpu:gloo" if gpu and config.get("cpu_offload") else None


def trainer_config(config: dict) -> dict:
    """The part of the config that TrainingArguments knows."""
    return {key: value for key, value in config.items() if not key.startswith("dp_")}


def parallelism(config: dict) -> ParallelismConfig | None:
    """The two mesh dimensions of HYBRID_SHARD, None for the other strategies."""
    if config.get("dp_replicate_size", 1) == 1:
        return None
    return ParallelismConfig(dp_replicate_size=config["dp_replicate_size"], dp_shard_size=config["dp_shard_size"])


def fsdp_name(config: dict) -> str:
    """The strategy by its usual name, e.g. ``FSDP2 SHARD_GRAD_OP``."""
    if config.get("version", 2) == 1:
        return f"FSDP1 {config.get('reshard_after_forward', 'full_shard').upper()}"
    if config.get("dp_replicate_size", 1) > 1:
        return "FSDP2 HYBRID_SHARD"
    return "FSDP2 FULL_SHARD" if config.get("reshard_after_forward", True) else "FSDP2 SHARD_GRAD_OP"


def check_wrap_classes(config: dict, path: str | None, model: torch.nn.Module) -> None:
    """Raises WorkshopError (exit code 2) for a class to wrap that the model does not have, listing those it has."""
    classes = {type(module).__name__ for module in model.modules()}
    for name in wrap_classes(config, model):
        if name not in classes:
            listed = ", ".join(sorted(classes))
            raise WorkshopError(
                f"{path}: transformer_layer_cls_to_wrap", f"the model has no {name}", f"choose from {listed}"
            )


def wrap_classes(config: dict, model: object) -> list[str]:
    """Names of the classes whose instances become units of their own: by default the model's own blocks.

    model: a transformers model, or anything with its `_no_split_modules`.
    """
    if config.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP") != "TRANSFORMER_BASED_WRAP":
        return []
    return config.get("transformer_layer_cls_to_wrap") or list(getattr(model, "_no_split_modules", None) or [])


def shard_on_cpu() -> None:
    """Let accelerate shard over gloo: it turns FSDP on only for a world of GPUs, and runs DDP otherwise.

    To be called just before the Trainer creates its Accelerator.
    """
    if not torch.cuda.is_available():
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
