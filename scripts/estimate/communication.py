"""Bytes that the ranks of a training send each other in an optimizer step.

Psi parameters (with the rows that FSDP2 adds to divide them by the ranks), n ranks, a micro batches in a step, c bytes
of a weight in the precision of the computation. A ring sends (n - 1) / n of a tensor in an all-gather and a
reduce-scatter, and twice that in an all-reduce. A reduce counts the same as a reduce-scatter in the mean of all ranks,
because its owner sends nothing. Real trainings send the same: benchmarks/communication.py has counted it on 2 and 4
ranks, and docs/collectives.md shows it. rehearse.py runs the same code as rank 0 of many, and tests compare it with
these formulas on up to 512.
"""

from dataclasses import dataclass

from distributed.fsdp_config import fsdp_strategy
from estimate.model_shape import FP32, Shape, weight_bytes
from estimate.zero3_gathering import gathered_elements
from settings.settings import Settings

GB = 1e9


@dataclass(frozen=True)
class Ring:
    """`ranks` ranks that send in a circle. Each rank's number is `distance` above that of the rank before it.

    The other ranks form rings of the same kind. size: bytes that each rank would send in an optimizer step if the ranks
    were very many.
    """

    ranks: int
    distance: int
    size: float

    @property
    def sent_bytes(self) -> float:
        return (self.ranks - 1) / self.ranks * self.size

    def bytes_between_nodes(self, gpus: int, gpus_per_node: int) -> float:
        """Return the mean of all ranks: in a ring over whole nodes one rank of each sends to the next node, and the
        others do not."""
        nodes_of_links = ((rank // gpus_per_node, self.next_rank(rank) // gpus_per_node) for rank in range(gpus))
        return self.sent_bytes * sum(here != there for here, there in nodes_of_links) / gpus

    def next_rank(self, rank: int) -> int:
        place = rank // self.distance % self.ranks
        return rank + self.distance * ((place + 1) % self.ranks - place)


def sent_bytes(shape: Shape, settings: Settings) -> float:
    """Bytes that each rank sends in an optimizer step. With tensor parallelism they include activations."""
    return sum(ring.sent_bytes for ring in rings(shape, settings))


def bytes_between_nodes(shape: Shape, settings: Settings) -> float:
    """The part of `sent_bytes` that leaves the node, if rings pass through one node after the other (mean of ranks)."""
    gpus = settings.estimate.gpus
    gpus_per_node = gpus // settings.estimate.nodes
    return sum(ring.bytes_between_nodes(gpus, gpus_per_node) for ring in rings(shape, settings))


def rings(shape: Shape, settings: Settings) -> list[Ring]:
    """The rings that a rank belongs to. The ranks of a shard, and those of a tensor group, have consecutive numbers
    (order of the meshes of accelerate and transformers)."""
    n = settings.estimate.gpus
    a = settings.trainer.gradient_accumulation_steps
    c = weight_bytes(settings)
    tensor_parallel = settings.model.tensor_parallel
    if settings.fsdp_config is not None:
        shape = shape.padded(settings.fsdp_config["dp_shard_size"])
    psi = shape.parameters
    blocks = sum(shape.block_sizes)
    if tensor_parallel > 1:
        in_group = Ring(tensor_parallel, 1, a * shape.exchanged)
        if settings.fsdp_config is None:
            return [in_group, Ring(n, 1, 2 * FP32 * shape.uncut)]  # the Trainer averages the gradients of what is whole
        return [in_group, Ring(n // tensor_parallel, tensor_parallel, FP32 * (a * (psi + blocks) + psi))]
    if settings.fsdp_config is not None:
        f = settings.fsdp_config["dp_shard_size"]
        # accelerate makes an embedding that is not the head a unit like a block; the rest stays gathered
        again = blocks + sum(shape.sizes[number] for number in shape.embedding)
        gathered = psi if "SHARD_GRAD_OP" in fsdp_strategy(settings.fsdp_config) else psi + again
        replicas = Ring(n // f, f, 2 * c * psi / f)  # all-reduce of the share, by HYBRID_SHARD
        return [Ring(f, 1, c * (a * gathered + psi)), replicas]  # gradients once in a step
    if settings.deepspeed_config is None:
        return [Ring(n, 1, 2 * FP32 * psi)]
    zero = settings.zero
    stage = zero.get("stage", 0)
    if stage == 3:
        return [Ring(n, 1, c * a * (gathered_elements(shape, zero) + psi))]
    # DeepSpeed 0.19.8: stages 1 and 2 all-reduce each bucket, unless this key makes them reduce it to the owners
    to_owner = stage > 0 and not zero.get("use_multi_rank_bucket_allreduce", True)
    reduced = (1 if to_owner else 2) * (a if stage == 2 else 1)  # stage 2: in each micro batch
    updated = 1 if stage > 0 else 0  # all-gather of the weights that each rank has updated
    return [Ring(n, 1, c * (reduced + updated) * psi)]
