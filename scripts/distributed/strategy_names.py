"""How a run spreads the model over its ranks, by name: as it was asked for, and as it runs."""

import os
from typing import Any

import torch

from distributed import inspect_fsdp
from distributed.fsdp_config import fsdp_name, wrap_classes
from settings.command_line import Options


def strategy_name(options: Options) -> str:
    """How the requested run spreads the model over its ranks."""
    if options.deepspeed_config is not None:
        return f"DeepSpeed ZeRO-{options.deepspeed_config['zero_optimization'].get('stage', 0)}"
    if options.values["tensor_parallel"] > 1:
        return "TP" if options.fsdp_config is None else "TP x FSDP2"
    if options.fsdp_config is not None:
        return fsdp_name(options.fsdp_config)
    return "DDP" if "RANK" in os.environ else "plain"


def effective_strategy(trainer: Any, engine) -> str:
    if engine is not None:
        return f"DeepSpeed ZeRO-{int(engine.zero_optimization_stage())}"
    if isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel):
        return "DDP"
    mesh = inspect_fsdp.tensor_mesh(trainer.model)
    if mesh:
        return "TP x FSDP2" if "fsdp" in mesh else "TP"
    return inspect_fsdp.live_name(trainer.model_wrapped, wrap_classes({}, trainer.model)) or "plain"
