"""Observe a step whose tensors are fake: the storages that are alive, their kinds, and the collectives.

PyTorch's FSDPMemTracker is not used, because it counts all activations as memory of the optimizer.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed.inspect_fsdp import local
from estimate.communication import Ring
from rehearsal.read_collective import SENT, Collective, read_collective

ACTIVATIONS = "activations, logits"  # includes all memory that is not of another kind
KINDS = ("parameters", "gradients", "optimizer state", "buffers", ACTIVATIONS)


@dataclass
class ObservedStep:
    """Bytes that a rank held, and collectives that it took part in.

    at_peak: bytes of each kind when their sum was largest. at_most: the maximum of each kind. peak_operation: phase and
    operator of the peak. collectives: all collectives in order, each with its phase.
    """

    at_peak: Counter[str] = field(default_factory=Counter)
    at_most: Counter[str] = field(default_factory=Counter)
    peak_operation: str = ""
    collectives: list[tuple[str, Collective]] = field(default_factory=list)

    def rings(self) -> list[Ring]:
        """Return the messages as rings, in the form of the predictions (`rings` of communication.py)."""
        sent = []
        for _, collective in self.collectives:
            number, last = len(collective.ranks), collective.ranks[-1]  # rank 0 is the first of these ranks
            sent.append(Ring(number, last // max(number - 1, 1), SENT[collective.kind] * collective.size))
        return sent


class Observer(TorchDispatchMode):
    """A dispatch mode that follows each storage from its allocation to its end, and each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "optimizer"
        self.operator = ""
        self.alive: dict[int, tuple[int, str]] = {}  # storage -> its bytes and kind
        self.now: Counter[str] = Counter()
        self.gradients: Callable[[], list] = list
        self.begin()

    def begin(self) -> ObservedStep:
        """Return a new ObservedStep, which is filled until the next call."""
        self.found = ObservedStep(Counter(self.now), Counter(self.now))
        return self.found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # this makes DTensor dispatch operators on its local parts
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Operators on tensors with values compute as usual. DDP writes the order of its buckets into an int32 tensor
        # and reads this tensor again, so the tensor needs values, too
        needs_values = func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") is torch.int32
        if needs_values or (tensors and all(type(tensor) is torch.Tensor for tensor in tensors)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        # A training run reads a few values. Return answers with which it continues: a loss of 1, and gradients without
        # overflow
        if func is torch.ops.aten._local_scalar_dense.default:
            return int(tensors[0].dtype.is_floating_point)
        if func is torch.ops.aten.allclose.default:
            return True
        collective = read_collective(func, args)
        self.operator = str(func)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
                self.note(tensor)
        if collective:
            self.note_collective(collective, tensors)
        return result

    def note_collective(self, collective: Collective, tensors: list[torch.Tensor]) -> None:
        self.found.collectives.append((self.phase, collective))
        for tensor in tensors:
            if self.classify(tensor) == ACTIVATIONS and isinstance(tensor, FakeTensor):
                self.note(tensor, "buffers")
        self.note_gradients()

    def note_gradients(self) -> None:
        for gradient in self.gradients():
            if isinstance(gradient, torch.Tensor):
                self.note(local(gradient), "gradients")

    def classify(self, tensor: torch.Tensor) -> str:
        return self.alive.get(tensor.untyped_storage()._cdata, (0, ACTIVATIONS))[1]

    def note(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        """Register a new storage, or set the kind of a known one."""
        storage = tensor.untyped_storage()
        known = self.alive.get(storage._cdata)
        if known is None:
            weakref.finalize(storage, self.change, storage._cdata, None)
        if known is None or (kind and known[1] != kind):
            self.change(storage._cdata, (storage.nbytes(), kind or ACTIVATIONS))

    def change(self, storage: int, held: tuple[int, str] | None) -> None:
        """Update the record of a storage. held: its bytes and kind, None at its end."""
        size, kind = self.alive.pop(storage, (0, ACTIVATIONS))
        self.now[kind] -= size
        if held is None:
            return
        self.alive[storage] = held
        size, kind = held
        self.now[kind] += size
        found = self.found
        found.at_most[kind] = max(found.at_most[kind], self.now[kind])
        if self.now.total() > found.at_peak.total():
            found.at_peak = Counter(self.now)
            found.peak_operation = f"{self.phase}, {self.operator}"

    @contextlib.contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Set the phase, for `profiling.mark_phases`. Phases are nested: backward contains forward."""
        before = self.phase
        self.phase = name
        yield
        self.note_gradients()
        self.phase = before

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all operators, and the storages that FSDP2 resizes, for which PyTorch calls no operator."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            if storage._cdata in self.alive:
                self.operator = "resize_"
                self.change(storage._cdata, (size, self.alive[storage._cdata][1]))
            return result

        with patch.object(torch.UntypedStorage, "resize_", resize), self:
            yield
