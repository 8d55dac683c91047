"""Faults that no log names by itself: losses and weights that are not finite, and copies of the weights that differ."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from distributed.collectives import gather_lists, max_over_ranks, rank, world_size
from distributed.inspect_fsdp import local
from shared.errors import ENVIRONMENT, WorkshopError

SHOWN_CHARACTERS = 60  # of a question

# 1. A loss that is not finite


def explain_loss(model: Any, losses: Iterator[torch.Tensor], question_of: Callable[[int], str]) -> str:
    """Compute the losses of a step again, and say where the first number is not finite. Collective.

    model: the model without wrappers. losses: an iterator that computes one micro batch after the other, on each rank
    equally often, because a sharded model computes on all ranks together. question_of: the text of a micro batch.
    """
    found: dict[str, Any] = {}

    def look(name: str, module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if not found and not all(each.isfinite().all() for each in floats(output)):
            inputs = [each.abs().max().item() for each in floats((args, kwargs))]
            found.update(place=name or "the model", name=name, largest=inputs[:1])

    hooks = [m.register_forward_hook(partial(look, name), with_kwargs=True) for name, m in model.named_modules()]
    with torch.no_grad():
        for number, loss in enumerate(losses):
            if not loss.isfinite():
                found.setdefault("place", "the loss")
            if found:
                found.setdefault("question", question_of(number))
    for hook in hooks:
        hook.remove()
    ranks = [each for (each,) in gather_lists([found])]
    first = next((number for number, each in enumerate(ranks) if each), None)
    if first is None:
        return "a second forward pass over the same questions is finite"
    fault = ranks[first]
    facts = []
    if "name" in fault:
        weights = list(model.get_submodule(fault["name"]).parameters(recurse=False))
        bad = gather_lists([not all(own_part(weight).isfinite().all() for weight in weights)])
        facts += [f"its weights are {'not finite' if [True] in bad else 'finite'}"] if weights else []
        facts += [f"its largest input is {size:.4g}" for size in fault["largest"]]
    place = fault["place"] + (f" ({', '.join(facts)})" if facts else "")
    question = fault["question"][:SHOWN_CHARACTERS]
    return f"rank {first} computes the first wrong number in {place}, from a micro batch that begins with {question!r}"


def floats(values: Any) -> Iterator[torch.Tensor]:
    """Yield this rank's parts of floating-point tensors in nested values. A module's input comes before a mask."""
    tensors = (local(each) for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    return (each for each in tensors if each.is_floating_point() and each.numel())


def own_part(weight: Any) -> torch.Tensor:
    """Return this rank's part of a weight, which under ZeRO-3 is ds_tensor.

    The parts of all ranks have one size. So the last part may end with memory that was never written.
    """
    if not hasattr(weight, "ds_tensor"):
        return local(weight).detach()
    part = weight.ds_tensor.detach()
    return part[: max(0, weight.ds_numel - rank() * part.numel())]


# 2. Weights that must not be saved


def check_weights(model: Any, step: int) -> None:
    """Check that the weights are finite, and that their copies are equal. Call this before they are saved. Collective.

    step: the number of optimizer steps that made these weights. Raise WorkshopError (exit code 1 or 3).
    """
    # A sum needs no second tensor, and it is not finite if one number is not. Sums in fp16 could overflow
    sums = [own_part(weight).sum(dtype=torch.float32) for weight in model.parameters()]
    if max_over_ranks(int(not all(each.isfinite() for each in sums))):
        # The loss of this step was finite. Otherwise, check_loss would have ended the run
        what = f"are not finite after step {step}, usually because a gradient was not; they are not saved"
        remedy = "resume from an older checkpoint with a lower --learning_rate"
        raise WorkshopError("weights", what, remedy, code=1)
    check_copies(model)


def check_copies(model: Any) -> None:
    """Compare the copies of each weight on all ranks, bit by bit. Collective.

    Raise WorkshopError (exit code 3) that names the weight and the rank whose copy differs from most others.
    """
    # Each rank has another part of a weight of ZeRO-3 or FSDP1
    weights = {
        name: weight
        for name, weight in model.named_parameters()
        if not hasattr(weight, "ds_tensor") and not hasattr(weight, "_fsdp_flattened")
    }
    if world_size() == 1 or not weights:
        return
    sums = torch.stack([sum_of_bits(own_part(weight)) for weight in weights.values()]).tolist()
    ranks = gather_lists([(part_of_rank(weight), bits) for weight, bits in zip(weights.values(), sums, strict=True)])
    for index, name in enumerate(weights):
        own = [each[index] for each in ranks]  # (part, sum of bits) of each rank
        for part in {part for part, _ in own}:
            copies = {number: bits for number, (its_part, bits) in enumerate(own) if its_part == part}
            (most, count), *others = Counter(copies.values()).most_common()
            if others:
                wrong = [number for number, bits in copies.items() if bits != most or count == 1]
                named = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
                what = f"{name} differs between ranks that hold the same weights: {named} of {len(copies)} copies"
                remedy = "resume from the last checkpoint, on other nodes if it happens again"
                raise WorkshopError("weights", what, remedy, ENVIRONMENT)


def part_of_rank(weight: Any) -> tuple[int, ...]:
    """Return which part of a weight this rank holds. Ranks with the same part hold copies of it."""
    if not isinstance(weight, DTensor):
        return ()
    place = weight.device_mesh.get_coordinate() or ()
    # Do not ask for Shard: _StridedShard, which FSDP uses with tensor parallelism, is not a subclass of it
    return tuple(at for at, how in zip(place, weight.placements, strict=True) if not isinstance(how, Replicate))


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits, read as whole numbers of 64 bits. It changes with each single bit.

    On a CPU, numbers of 32 bits would need 50 times as long, because torch converts each of them.
    """
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = len(octets) // 8 * 8
    return octets[:whole].view(torch.int64).sum() + octets[whole:].sum()
