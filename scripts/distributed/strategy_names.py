"""How a run spreads the model over its ranks, by name: as it was asked for, and as it runs."""

import os
from typing import Any

import torch

from distributed import inspect_fsdp
from distributed.fsdp_config import fsdp_name, wrap_classes
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


def effective_strategy(trainer: Any, engine: Any) -> str:
    """The strategy that runs. engine: DeepSpeed's, None without DeepSpeed."""
    if engine is not None:
        return f"DeepSpeed ZeRO-{int(engine.zero_optimization_stage())}"
    if isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel):
        return "DDP"
    mesh = inspect_fsdp.tensor_mesh(trainer.model)
    if mesh:
        return "TP x FSDP2" if "fsdp" in mesh else "TP"
    return inspect_fsdp.live_name(trainer.model_wrapped, wrap_classes({}, trainer.model)) or "plain"
