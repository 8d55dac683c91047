"""The name of the strategy by which a run spreads the model over its ranks."""

import os

from distributed.fsdp_config import fsdp_name
from settings.settings import Settings


def strategy_name(settings: Settings) -> str:
    """The strategy that was asked for, such as ``DeepSpeed ZeRO-2``."""
    if settings.deepspeed_config is not None:
        return f"DeepSpeed ZeRO-{settings.zero.get('stage', 0)}"
    if settings.model.tensor_parallel > 1:
        return "TP" if settings.fsdp_config is None else "TP x FSDP2"
    if settings.fsdp_config is not None:
        return fsdp_name(settings.fsdp_config)
    return "DDP" if "RANK" in os.environ else "plain"
