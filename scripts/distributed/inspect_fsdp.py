"""Units, shards, strategy and offload that FSDP has set up in a live model.

Call these functions before the first forward pass, because FSDP2 leaves some parameters gathered after it.
"""

from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from distributed.strategy import FSDP1, FULL_SHARD, HYBRID_SHARD, SHARD_GRAD_OP, Strategy


def modules_by_class(model: torch.nn.Module, class_names: list[str]) -> list[torch.nn.Module]:
    """Return the modules of these classes. fully_shard turns each class into a subclass named FSDP<class>."""
    return [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in class_names]


def sharded_blocks(model: torch.nn.Module, class_names: list[str]) -> list[torch.nn.Module]:
    """Return the blocks that are FSDP units: each is gathered and freed on its own."""
    blocks = modules_by_class(model, class_names)
    if isinstance(model, FullyShardedDataParallel):
        units = {id(unit.module) for unit in FullyShardedDataParallel.fsdp_modules(model)}
        return [m for m in blocks if id(getattr(m, "_checkpoint_wrapped_module", m)) in units]
    return [m for m in blocks if isinstance(m, FSDPModule)]


def other_units(model: torch.nn.Module, class_names: list[str]) -> list[str]:
    """Return the class names of the units that are not blocks, such as embedding, last norm, head and root."""
    if isinstance(model, FullyShardedDataParallel):
        names = [type(unit.module).__name__ for unit in FullyShardedDataParallel.fsdp_modules(model)]
    else:
        units = [m for m in model.modules() if isinstance(m, FSDPModule) and not isinstance(m, CheckpointWrapper)]
        names = [type(m).__name__.removeprefix("FSDP") for m in units]
    return [name for name in names if name not in class_names]


def local_fraction(model: torch.nn.Module) -> float:
    """Return the fraction of all parameters that this rank holds, 1.0 without sharding."""
    if isinstance(model, FullyShardedDataParallel):
        flat = [unit._handle.flat_param for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._handle]
        return sum(p._sharded_size.numel() for p in flat) / sum(p._unpadded_unsharded_size.numel() for p in flat)
    parameters = list(model.parameters())
    return sum(local(p).numel() for p in parameters) / sum(p.numel() for p in parameters)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def live_strategy(model: torch.nn.Module, class_names: list[str]) -> Strategy | None:
    """Return the strategy that is in effect, or None without FSDP."""
    if isinstance(model, FullyShardedDataParallel):
        name = model.sharding_strategy.name  # FSDP1 does not shard on a single rank, and then the name is NO_SHARD
        return FSDP1.get(name, Strategy(f"FSDP1 {name}", f"FSDP1 {name}"))
    if not isinstance(model, FSDPModule):
        return None
    blocks_or_root = [m for m in [*sharded_blocks(model, class_names), model] if isinstance(m, FSDPModule)]
    group = unit_group(blocks_or_root[0])
    if group.mesh_info.mesh.ndim == 2:
        return HYBRID_SHARD
    return SHARD_GRAD_OP if group.post_forward_mesh_info is None else FULL_SHARD


def mesh_shape(model: torch.nn.Module) -> str:
    """Return the numbers of replicas and shards as text, such as ``2 x 4``."""
    if isinstance(model, FullyShardedDataParallel):
        shards = torch.distributed.get_world_size(model.process_group)
        return f"{torch.distributed.get_world_size() // shards} x {shards}"
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    shape = mesh.mesh.shape
    return f"{shape[0] if len(shape) == 2 else 1} x {shape[-1]}"


def tensor_mesh(model: torch.nn.Module) -> dict[str, int]:
    """Return the sizes of the mesh's dimensions by name. Without tensor parallelism, the dict is empty."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    sizes = [dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)) for mesh in meshes]
    return next((size_by_name for size_by_name in sizes if "tp" in size_by_name), {})


def shard_is_on_cpu(model: torch.nn.Module) -> bool:
    """Return True if FSDP offloads this rank's shard to CPU memory."""
    if isinstance(model, FullyShardedDataParallel):
        return model.cpu_offload.offload_params
    units = [unit_group(m) for m in model.modules() if isinstance(m, FSDPModule)]
    groups = [group for group in units if group is not None]
    return bool(groups) and all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)


def checkpointed_blocks(model: torch.nn.Module) -> int:
    """Return the number of blocks with activation checkpointing."""
    return sum(isinstance(m, CheckpointWrapper) for m in model.modules())


def unit_group(module: FSDPModule) -> Any:
    """Return the parameter group that a unit gathers at once, None if the unit has no parameters of its own."""
    return module._get_fsdp_state()._fsdp_param_group
