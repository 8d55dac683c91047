"""The strategies that divide a training run among its ranks, and the facts in which they differ.

`choose_strategy` returns the requested strategy. training/audit.py compares it with the strategy that is in effect.
"""

import os
from dataclasses import dataclass, replace

from settings.settings import Settings

GRADIENTS, OPTIMIZER, WEIGHTS = "gradients", "optimizer state", "weights"


@dataclass(frozen=True)
class Strategy:
    """A strategy.

    name: as logs, run records and checkpoints show it. family: strategies of one family resume from each other's
    checkpoints. shards: the parts of the model state that are sharded, so that no rank holds them whole. regathers:
    True if the backward pass gathers sharded weights again, because they are freed after the forward pass.
    any_ranks: True if any number of ranks can resume from a checkpoint. Otherwise each rank has a part of its own.

    checkpoint_bytes: bytes of a checkpoint per trained parameter with Adam, for a run in fp32 and for one in 16-bit
    precision; None if the strategy writes none. frozen_copies: copies of a frozen weight in a checkpoint. tied_heads:
    extra copies of a head that is tied to the embedding.
    """

    name: str
    family: str
    shards: tuple[str, ...] = ()
    regathers: bool = True
    any_ranks: bool = False
    checkpoint_bytes: tuple[int, int] | None = None
    frozen_copies: int = 1
    tied_heads: int = 0


PLAIN = Strategy("plain", "plain or DDP", any_ranks=True, checkpoint_bytes=(12, 12))
DDP = replace(PLAIN, name="DDP")


def zero(stage: int, *shards: str, checkpoint_bytes: tuple[int, int], **others: bool | int) -> Strategy:
    """Return a stage of ZeRO. DeepSpeed saves all weights twice in the training's precision, and fp32 masters."""
    name = f"DeepSpeed ZeRO-{stage}"
    facts = {"frozen_copies": 2, "tied_heads": 1} | others
    return Strategy(name, name, shards, checkpoint_bytes=checkpoint_bytes, **facts)  # type: ignore[arg-type]


ZERO = (
    zero(0, checkpoint_bytes=(16, 16), any_ranks=True),  # in fp32 the masters are the weights
    zero(1, OPTIMIZER, checkpoint_bytes=(20, 16)),
    zero(2, OPTIMIZER, GRADIENTS, checkpoint_bytes=(20, 16)),
    zero(3, OPTIMIZER, GRADIENTS, WEIGHTS, checkpoint_bytes=(16, 14), tied_heads=0),  # the weights once
)
# FSDP saves the weights twice
FULL_SHARD = Strategy(
    "FSDP2 FULL_SHARD",
    "FSDP2",
    (OPTIMIZER, GRADIENTS, WEIGHTS),
    any_ranks=True,
    checkpoint_bytes=(16, 16),
    frozen_copies=2,
    tied_heads=2,
)
SHARD_GRAD_OP = replace(FULL_SHARD, name="FSDP2 SHARD_GRAD_OP", regathers=False)
HYBRID_SHARD = replace(FULL_SHARD, name="FSDP2 HYBRID_SHARD")
FSDP1 = {
    name: replace(each, name=f"FSDP1 {name}", family=f"FSDP1 {name}", any_ranks=False)
    for name, each in (("FULL_SHARD", FULL_SHARD), ("SHARD_GRAD_OP", SHARD_GRAD_OP))
}
TENSOR_PARALLEL = Strategy("TP", "TP")
TENSOR_PARALLEL_FSDP2 = Strategy("TP x FSDP2", "TP x FSDP2", (OPTIMIZER, GRADIENTS, WEIGHTS))

STRATEGIES = (PLAIN, DDP, *ZERO, FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, *FSDP1.values())
BY_NAME = {each.name: each for each in (*STRATEGIES, TENSOR_PARALLEL, TENSOR_PARALLEL_FSDP2)}


def choose_strategy(settings: Settings) -> Strategy:
    """Return the requested strategy. The settings contain the content of their config files."""
    if settings.deepspeed_config is not None:
        return ZERO[settings.zero.get("stage", 0)]
    if settings.model.tensor_parallel > 1:
        return TENSOR_PARALLEL if settings.fsdp_config is None else TENSOR_PARALLEL_FSDP2
    if settings.fsdp_config is not None:
        return fsdp_strategy(settings.fsdp_config)
    return DDP if "RANK" in os.environ else PLAIN


def fsdp_strategy(config: dict) -> Strategy:
    """Return the strategy of an FSDP config."""
    if config.get("version", 2) == 1:
        return FSDP1[config.get("reshard_after_forward", "full_shard").upper()]
    if config.get("dp_replicate_size", 1) > 1:
        return HYBRID_SHARD
    return FULL_SHARD if config.get("reshard_after_forward", True) else SHARD_GRAD_OP
