"""Count the parameters that ZeRO-3 gathers in a micro batch, by simulating DeepSpeed's prefetching.

No simple formula gives these numbers. ZeRO-3 gathers a layer once or twice, and for models of about 10^9 parameters
this depends on how far DeepSpeed prefetches. It gathers bloom-1b1, for example, 1.22 times (docs/zero.md). A formula
with stage3_max_live_parameters gives 1.06, and a formula with stage3_max_reuse_distance gives 1.53.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import accumulate, groupby

from estimate.memory import zero_size
from estimate.model_shape import Shape


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

    calls = [
        [parameter for parameter in call if shape.sizes[parameter] > never_sharded] for call in calls_of_passes(shape)
    ]
    before = list(accumulate(map(elements, calls), initial=0))  # elements of all earlier calls, for each call
    uses = deque((parameter, time) for time, call in enumerate(calls) for parameter in call)
    last_use_seen: dict[int, int] = {}
    live: set[int] = set()
    gathered = 0
    for time, call in enumerate(calls):
        gathered += elements(set(call) - live)
        live.update(call)
        room = min(bucket, most_live - elements(live))
        ahead = 0
        while uses and (uses[0][1] <= time or ahead < room):
            parameter, time_of_use = uses.popleft()
            last_use_seen[parameter] = time_of_use
            ahead += elements({parameter} - live)
            live.add(parameter)
        gathered += ahead
        end_of_soon = bisect_left(before, before[time + 1] + soon)
        used_soon = set().union(*calls[time + 1 : end_of_soon])
        live -= {parameter for parameter in call if last_use_seen[parameter] <= time + 1} - used_soon
    return gathered


def calls_of_passes(shape: Shape) -> list[tuple[int, ...]]:
    """Return the parameters of each module in the order in which the forward and the backward pass use the modules.

    With activation checkpointing, the backward pass first computes a block again, then its gradients. The backward pass
    ends at the first module with trained parameters: with LoRA it does not reach the embedding.
    """
    last_with_gradients = next(time for time, call in enumerate(shape.calls) if shape.trainable_elements(call))
    blocks = {parameter: number for number, block in enumerate(shape.blocks) for parameter in block}
    # The number of each call's block, or -1. A module without parameters counts to the block of the call before it
    numbers: list[int] = []
    for call in shape.calls:
        numbers.append(blocks.get(call[0], -1) if call else (numbers or [-1])[-1])
    backward: list[tuple[int, ...]] = []
    reached = list(zip(numbers, shape.calls, strict=True))[last_with_gradients:]
    for number, group in groupby(reversed(reached), key=lambda each: each[0]):
        gradients = [call for _, call in group]
        recomputed = gradients[::-1] if shape.recomputes and number >= 0 else []
        backward += recomputed + gradients
    return [*shape.calls, *backward]
