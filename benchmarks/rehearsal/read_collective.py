"""Kind, ranks and bytes of a collective, read from the operator that PyTorch's dispatcher runs.

The dispatcher sees collectives that C++ starts as well as those that Python starts. benchmarks/communication.py counts
the collectives of real training runs with this module, and the observer of a rehearsal does so, too.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

SMALL = 1024  # bytes. Smaller messages are a loss, a norm, a number of tokens or a stop signal
# Bytes that a rank sends per byte of the whole tensor, in a ring of very many ranks
SENT = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1, "reduce": 1}
# Operators of torch.distributed: name -> kind, and position of the argument that is the whole tensor
OPERATORS = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
}
FUNCTIONAL = {  # operators of DTensor
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
}
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier")


class Collective(NamedTuple):
    """One collective. size: bytes of the whole tensor, with the parts of all ranks. ranks: members of the group."""

    kind: str
    dtype: str
    ranks: tuple[int, ...]
    size: int


def read_collective(operator: Any, arguments: tuple[Any, ...]) -> Collective | None:
    """Return the collective that an operator starts, or None if the operator is not a collective.

    Raises NotImplementedError for a collective that this module does not know.
    """
    name = operator.overloadpacket.__name__
    if "c10d" not in operator.namespace or name in SILENT:
        return None
    if operator.namespace == "c10d" and name in OPERATORS:
        kind, position = OPERATORS[name]
        tensors = tree_leaves(arguments[position])
        objects = [each for each in arguments if isinstance(each, torch.ScriptObject)]
        group = next(dist.ProcessGroup.unbox(each) for each in objects if "ProcessGroup" in str(each))
        size = sum(tensor.nbytes for tensor in tensors)
    elif operator.namespace == "_c10d_functional" and name in FUNCTIONAL:
        kind = FUNCTIONAL[name]
        tensors = [arguments[0]]
        group = dist.distributed_c10d._resolve_process_group(arguments[-1])
        size = arguments[0].nbytes * (group.size() if kind == "all-gather" else 1)
    else:
        raise NotImplementedError(f"{operator} is not counted yet")
    ranks = tuple(dist.get_process_group_ranks(group))
    return Collective(kind, str(tensors[0].dtype).removeprefix("torch."), ranks, size)
