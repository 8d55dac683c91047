"""Predict the bytes that each rank sends in an optimizer step.

Symbols: psi parameters (with FSDP2's padding), t trained parameters (all of them without LoRA), n ranks, a micro
batches in a step, c bytes of a weight in the precision of the computation. In a ring, each rank sends (n - 1) / n of a
tensor in an all-gather or a reduce-scatter, and twice as much in an all-reduce. A reduce counts like a reduce-scatter:
this is the mean of all ranks, because the owner of a reduced tensor sends nothing.

Real training runs on 2 and 4 ranks send the predicted bytes (benchmarks/communication.py, docs/collectives.md). Tests
compare these formulas with rehearsals (benchmarks/rehearse.py) of up to 512 ranks.
"""

from dataclasses import dataclass

from distributed.strategy import choose_strategy
from estimate.model_shape import FP32, Shape, weight_bytes
from settings.settings import Settings


@dataclass(frozen=True)
class Ring:
    """A ring of ranks, in which each rank sends to the next one. The ranks outside it form rings of the same kind.

    ranks: number of ranks in the ring. distance: difference between the numbers of two neighbours. size: bytes, of
    which a rank sends the fraction (ranks - 1) / ranks in an optimizer step.
    """

    ranks: int
    distance: int
    size: float

    @property
    def sent_bytes(self) -> float:
        return (self.ranks - 1) / self.ranks * self.size

    def bytes_between_nodes(self, gpus: int, gpus_per_node: int) -> float:
        """Bytes that a rank sends to another node, as the mean of all ranks.

        In a ring over whole nodes, only one rank of each node sends to another node.
        """
        links = ((rank // gpus_per_node, self.next_rank(rank) // gpus_per_node) for rank in range(gpus))
        return self.sent_bytes * sum(sender != receiver for sender, receiver in links) / gpus

    def next_rank(self, rank: int) -> int:
        place = rank // self.distance % self.ranks
        return rank + self.distance * ((place + 1) % self.ranks - place)


def sent_bytes(shape: Shape, settings: Settings) -> float:
    """Predict the bytes that each rank sends in an optimizer step, including the activations of tensor parallelism."""
    return sum(ring.sent_bytes for ring in rings(shape, settings))


def bytes_between_nodes(shape: Shape, settings: Settings) -> float:
    """Predict the part of `sent_bytes` that leaves the node, as the mean of all ranks.

    Rings are assumed to pass through one node after the other.
    """
    gpus = settings.estimate.gpus
    gpus_per_node = gpus // settings.estimate.nodes
    return sum(ring.bytes_between_nodes(gpus, gpus_per_node) for ring in rings(shape, settings))


def rings(shape: Shape, settings: Settings) -> list[Ring]:
    """Return the rings that a rank belongs to.

    The ranks of a shard group or a tensor group have consecutive numbers, as in the device meshes of accelerate and
    transformers.
    """
    n = settings.estimate.gpus
    a = settings.trainer.gradient_accumulation_steps
    c = weight_bytes(settings)
    strategy = choose_strategy(settings, n)
    degrees = strategy.degrees
    if settings.fsdp_config is not None:
        shape = shape.padded(degrees.shards)
    psi = shape.parameters
    t = shape.trainable
    blocks = sum(shape.block_sizes)
    if degrees.tensor > 1:
        in_group = Ring(degrees.tensor, 1, a * shape.exchanged)
        if settings.fsdp_config is None:
            # The Trainer averages the gradients of parameters that are not cut
            return [in_group, Ring(n, 1, 2 * FP32 * shape.uncut)]
        return [in_group, Ring(degrees.shards, degrees.tensor, FP32 * (a * (psi + blocks) + psi))]
    if settings.fsdp_config is not None:
        f = degrees.shards
        # The backward pass gathers again the units that the forward pass freed: blocks, and an embedding whose weight
        # is not the head's. The root unit stays gathered
        again = blocks + sum(shape.sizes[number] for number in shape.embedding)
        gathered = psi + again if strategy.regathers else psi
        replicas = Ring(degrees.replicas, f, 2 * c * t / f)  # HYBRID_SHARD all-reduces the shard of the gradients
        return [Ring(f, 1, c * (a * gathered + t)), replicas]  # gradients are reduced once in a step
    if settings.deepspeed_config is None:
        return [Ring(n, 1, 2 * FP32 * t)]
    zero = settings.zero
    stage = zero.get("stage", 0)
    if stage == 3:
        return [Ring(n, 1, c * a * (gathered_elements(shape, zero) + t))]
    # In DeepSpeed 0.19.8, stages 1 and 2 all-reduce each bucket. If this key is false, they reduce it to its owners
    to_owner = stage > 0 and not zero.get("use_multi_rank_bucket_allreduce", True)
    reduced = (1 if to_owner else 2) * (a if stage == 2 else 1)  # stage 2 reduces in each micro batch
    updated = 1 if stage > 0 else 0  # all-gather of the updated weights
    return [Ring(n, 1, c * (reduced + updated) * t)]


def gathered_elements(shape: Shape, zero: dict) -> float:
    """Estimate the elements that ZeRO-3 gathers in a micro batch, once for each time that it gathers them.

    This is a rule of thumb. DeepSpeed keeps a layer after the forward pass if the backward pass uses it again within
    stage3_max_reuse_distance elements. It gathers all other layers a second time. The rule leaves out DeepSpeed's
    prefetching, because of which DeepSpeed keeps more layers of a model near this limit: it gathers bloom-1b1 1.22
    times, and the rule gives 1.53. With the other sizes of BLOOM the bytes that a rank sends are right within 6 %.
    """
    distance = zero.get("stage3_max_reuse_distance", 1e9)
    psi = shape.parameters
    blocks = sum(shape.block_sizes)
    # Between the two uses of a layer, both passes use all layers that come after it
    gathered = psi + max(0, shape.used_in_backward_pass - distance / 2)
    if not shape.embedding and blocks > distance and (shape.recomputes or not shape.frozen):
        # The embedding is also the head, so it is gathered at the beginning, in the middle and at the end of the passes
        gathered += psi - blocks
    if shape.recomputes:
        # DeepSpeed frees the frozen weights of a block when it has computed the block again. For the gradients it
        # gathers all of them except the last matrix, which is one of the largest
        frozen = [[shape.sizes[n] for n in block if not shape.trained[n]] for block in shape.blocks]
        gathered += sum(sum(sizes) - max(sizes, default=0) for sizes in frozen)
    return gathered
