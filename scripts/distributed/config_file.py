"""The JSON file of --deepspeed or --fsdp_config.

All programs read it by `read_config_file`, and transformers gets the content that was checked, not the path.
"""

from dataclasses import replace
from typing import Any

from transformers import TrainingArguments

from distributed.ds_config import check_choices, check_contradictions, check_ds_config
from distributed.fsdp_config import check_device, check_fsdp_config, parallelism
from distributed.process_group import adopt_process_group
from distributed.tensor_parallel import check_groups
from settings.settings import Settings
from settings.trainer_flags import training_arguments


def read_config_file(settings: Settings, ranks: int, ranks_per_node: int) -> Settings:
    """Return the settings with the checked content of --deepspeed or --fsdp_config, for a run on these ranks.

    Raises WorkshopError (exit code 2).
    """
    check_groups(settings, ranks)
    if settings.trainer.deepspeed:
        settings = replace(settings, deepspeed_config=check_ds_config(settings.trainer.deepspeed))
        check_choices(settings)
    if settings.trainer.fsdp:
        size = settings.model.tensor_parallel  # with tensor parallelism FSDP shards over tensor groups, not ranks
        config = check_fsdp_config(settings, ranks // size, ranks_per_node // size)
        settings = replace(settings, fsdp_config=config)
    return settings


def sharding_arguments(settings: Settings) -> dict[str, Any]:
    """Return the values for TrainingArguments that turn on ZeRO or FSDP."""
    # With tensor parallelism, train.py shards the model itself, and the Trainer gets no FSDP config
    fsdp_config = settings.fsdp_config if settings.model.tensor_parallel == 1 else None
    return {
        "deepspeed": settings.deepspeed_config,  # transformers replaces each "auto" by the value of a flag
        "fsdp": fsdp_config is not None,
        # The Trainer does not know the dp_* keys, which belong to this workshop
        "fsdp_config": {key: value for key, value in (fsdp_config or {}).items() if not key.startswith("dp_")},
        "parallelism_config": parallelism(fsdp_config),  # replicas x shards, for HYBRID_SHARD
    }


def start_process_group(settings: Settings, **others: Any) -> TrainingArguments:
    """Create TrainingArguments, which open the process group and turn on ZeRO or FSDP.

    Call this before the model is created, because ZeRO-3 shards the weights while they are loaded. others: further
    values for TrainingArguments. Raises WorkshopError (exit code 2, or 3 if this machine cannot run the config).
    """
    check_device(settings)
    args = training_arguments(settings, **sharding_arguments(settings), **others)
    with_deepspeed = settings.deepspeed_config is not None
    if with_deepspeed:
        check_contradictions(settings, args)
    adopt_process_group(args, with_deepspeed)  # DeepSpeed uses the group of TrainingArguments
    return args
