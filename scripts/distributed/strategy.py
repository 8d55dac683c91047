"""The strategies that divide a training run among its ranks, and the facts in which they differ.

`choose_strategy` returns the requested strategy. guard/audit.py compares it with the strategy that is in effect.
"""

import os
from dataclasses import dataclass, field, replace

from settings.settings import Settings

GRADIENTS, OPTIMIZER, WEIGHTS = "gradients", "optimizer state", "weights"


@dataclass(frozen=True)
class Degrees:
    """Division of the ranks: replicas x shards x tensor.

    replicas: copies of the model. shards: parts of each copy; `Strategy.shards` names what is divided. tensor: ranks of
    a tensor group, which cut each matrix and process the same questions.
    """

    replicas: int = 1
    shards: int = 1
    tensor: int = 1

    @property
    def groups(self) -> int:
        """Number of ranks, or of tensor groups, that process different questions."""
        return self.replicas * self.shards

    @property
    def ranks(self) -> int:
        return self.groups * self.tensor

    def __str__(self) -> str:
        numbers = {"replicas": self.replicas, "shards": self.shards, "ranks per tensor group": self.tensor}
        product = " x ".join(f"{number} {name}" for name, number in numbers.items() if number > 1)
        return f"{self.ranks} ranks = {product}" if product else "1 rank"


@dataclass(frozen=True)
class Strategy:
    """A strategy.

    name: as logs, run records and checkpoints show it. family: strategies of one family resume from each other's
    checkpoints. shards: the parts of the model state that are sharded, so that no rank holds them whole. regathers:
    True if the backward pass gathers sharded weights again, because they are freed after the forward pass.
    any_ranks: True if any number of ranks can resume from a checkpoint. Otherwise each rank has a part of its own.
    autocasts: True if autocast casts fp32 weights for each operation. Otherwise DeepSpeed holds weights in the
    precision of the computation, or FSDP casts weights when it gathers them.

    checkpoint_bytes: bytes of a checkpoint per trained parameter with Adam, for a run in fp32 and for one in 16-bit
    precision; None if the strategy writes none. frozen_copies: copies of a frozen weight in a checkpoint. tied_heads:
    extra copies of a head that is tied to the embedding. degrees: the division of a run's ranks; strategies that differ
    only in it are equal.
    """

    name: str
    family: str
    shards: tuple[str, ...] = ()
    regathers: bool = True
    any_ranks: bool = False
    autocasts: bool = False
    checkpoint_bytes: tuple[int, int] | None = None
    frozen_copies: int = 1
    tied_heads: int = 0
    degrees: Degrees = field(default=Degrees(), compare=False)

    @property
    def shards_weights(self) -> bool:
        """True if each rank holds only a part of the weights, so that all ranks must compute together."""
        return WEIGHTS in self.shards

    @property
    def saves_checkpoints(self) -> bool:
        return self.checkpoint_bytes is not None

    @property
    def line(self) -> str:
        """Line of the log with the strategy and the division of the ranks."""
        return f"strategy: {self.name} on {self.degrees}"


PLAIN = Strategy("plain", "plain or DDP", any_ranks=True, autocasts=True, checkpoint_bytes=(12, 12))
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
TENSOR_PARALLEL = Strategy("TP", "TP", autocasts=True)
TENSOR_PARALLEL_FSDP2 = Strategy("TP x FSDP2", "TP x FSDP2", (OPTIMIZER, GRADIENTS, WEIGHTS), autocasts=True)

STRATEGIES = (PLAIN, DDP, *ZERO, FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, *FSDP1.values())
BY_NAME = {each.name: each for each in (*STRATEGIES, TENSOR_PARALLEL, TENSOR_PARALLEL_FSDP2)}


def choose_strategy(settings: Settings, ranks: int) -> Strategy:
    """Return the requested strategy with its degrees. The settings contain the content of their config files."""
    strategy = strategy_without_degrees(settings, ranks)
    tensor = settings.model.tensor_parallel
    config = settings.fsdp_config or {}
    shards = config.get("dp_shard_size", ranks // tensor if strategy.shards else 1)
    degrees = Degrees(config.get("dp_replicate_size", ranks // tensor // shards), shards, tensor)
    return replace(strategy, degrees=degrees)


def strategy_without_degrees(settings: Settings, ranks: int) -> Strategy:
    """Return the requested strategy, with the degrees of one rank."""
    if settings.deepspeed_config is not None:
        return ZERO[settings.zero.get("stage", 0)]
    if settings.model.tensor_parallel > 1:
        return TENSOR_PARALLEL if settings.fsdp_config is None else TENSOR_PARALLEL_FSDP2
    if settings.fsdp_config is not None:
        return fsdp_strategy(settings.fsdp_config)
    return DDP if ranks > 1 or "RANK" in os.environ else PLAIN


def fsdp_strategy(config: dict) -> Strategy:
    """Return the strategy of an FSDP config."""
    if config.get("version", 2) == 1:
        return FSDP1[config.get("reshard_after_forward", "full_shard").upper()]
    if config.get("dp_replicate_size", 1) > 1:
        return HYBRID_SHARD
    return FULL_SHARD if config.get("reshard_after_forward", True) else SHARD_GRAD_OP
