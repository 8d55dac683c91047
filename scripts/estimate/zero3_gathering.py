"""Count the parameters that ZeRO-3 gathers in a micro batch, by simulating DeepSpeed's prefetching.

No simple formula gives these numbers. ZeRO-3 gathers a layer once or twice, and for models of about 10^9 parameters
this depends on how far DeepSpeed prefetches. It gathers bloom-1b1, for example, 1.22 times (docs/zero.md). A formula
with stage3_max_live_parameters gives 1.06, and a formula with stage3_max_reuse_distance gives 1.53.
"""

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from estimate.memory import zero_size
from estimate.model_shape import Shape


class Call(NamedTuple):
    """A module that computes, in the forward or the backward pass. Parameters are indices in Shape.sizes.

    used: parameters that are gathered before it computes. unused_soon: those of them that are freed after it, unless
    they are used again soon. freed: parameters that are freed after it in any case.
    """

    used: tuple[int, ...]
    unused_soon: tuple[int, ...]
    freed: tuple[int, ...] = ()


def gathered_elements(shape: Shape, zero: dict) -> int:
    """Count the elements that ZeRO-3 gathers in a micro batch, once for each time that it gathers them.

    DeepSpeed 0.19.8 (runtime/zero/partitioned_param_coordinator.py) gathers the parameters of a module before the
    module computes. It prefetches the next parameters while there is room. After the module it frees the module's
    parameters, with two exceptions: parameters that are used again soon, and parameters whose next use the prefetching
    has passed while they were still gathered.
    """
    most_live = zero.get("stage3_max_live_parameters", 1e9)
    soon = zero.get("stage3_max_reuse_distance", 1e9)
    bucket = zero_size(zero, "stage3_prefetch_bucket_size", 0.9 * shape.hidden**2, 5e7)
    never_sharded = zero_size(zero, "stage3_param_persistence_threshold", 10 * shape.hidden, 1e5)

    def elements(parameters: Iterable[int]) -> int:
        return sum(shape.sizes[parameter] for parameter in parameters)

    def sharded(parameters: Iterable[int]) -> tuple[int, ...]:
        return tuple(parameter for parameter in parameters if shape.sizes[parameter] > never_sharded)

    calls = [Call(*map(sharded, call)) for call in calls_of_passes(shape)]
    before = list(
        itertools.accumulate((elements(call.used) for call in calls), initial=0)
    )  # elements of all earlier calls
    uses = deque((parameter, time) for time, call in enumerate(calls) for parameter in call.used)
    last_use_seen: dict[int, int] = {}
    live: set[int] = set()
    gathered = 0
    for time, call in enumerate(calls):
        gathered += elements(set(call.used) - live)
        live.update(call.used)
        room = min(bucket, most_live - elements(live))
        ahead = 0
        while uses and (uses[0][1] <= time or ahead < room):
            parameter, time_of_use = uses.popleft()
            last_use_seen[parameter] = time_of_use
            ahead += elements({parameter} - live)
            live.add(parameter)
        gathered += ahead
        end_of_soon = bisect_left(before, before[time + 1] + soon)
        used_soon = {parameter for later in calls[time + 1 : end_of_soon] for parameter in later.used}
        live -= {parameter for parameter in call.unused_soon if last_use_seen[parameter] <= time + 1} - used_soon
        live -= set(call.freed)
    return gathered


def calls_of_passes(shape: Shape) -> list[Call]:
    """Return the modules in the order in which the forward and the backward pass use them.

    With activation checkpointing, the backward pass first computes a block again, then its gradients. The backward pass
    ends at the first module with trained parameters, so with LoRA it does not reach the embedding. With activation
    checkpointing it does, because transformers then requires gradients of the embedding's output.
    """
    last_with_gradients = next(
        time for time, used in enumerate(shape.calls) if shape.recomputes or shape.trainable_elements(used)
    )
    blocks = {parameter: number for number, block in enumerate(shape.blocks) for parameter in block}
    # The number of each call's block, or -1. A module without parameters counts to the block of the call before it
    numbers: list[int] = []
    for used in shape.calls:
        numbers.append(blocks.get(used[0], -1) if used else (numbers or [-1])[-1])
    backward: list[Call] = []
    reached = list(zip(numbers, shape.calls, strict=True))[last_with_gradients:]
    for number, group in itertools.groupby(reversed(reached), key=lambda each: each[0]):
        gradients = [used for _, used in group]
        if shape.recomputes and number >= 0:
            backward += recomputed_block(gradients, shape)
        else:
            backward += [Call(used, used) for used in gradients]
    return [*(Call(used, used) for used in shape.calls), *backward]


def recomputed_block(gradients: list[tuple[int, ...]], shape: Shape) -> list[Call]:
    """Return the modules of the backward pass of a block that is computed again. gradients: their parameters.

    DeepSpeed keeps the frozen parameters of the block until the backward pass of the block's last module ends, because
    this is where the block is computed again. Then it frees all of them, even those that are used next.
    """
    frozen = {parameter for parameter, trained in enumerate(shape.trained) if not trained}
    recomputed = [Call(used, tuple(set(used) - frozen)) for used in reversed(gradients)]
    calls = [Call(used, used) for used in gradients]
    last_module = next(place for place, used in enumerate(gradients) if used)
    calls[last_module] = calls[last_module]._replace(freed=tuple(frozen.intersection(itertools.chain(*gradients))))
    return [*recomputed, *calls]
