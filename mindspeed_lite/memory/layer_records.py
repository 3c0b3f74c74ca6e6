"""Records what autograd saves in each layer, and the seconds to recompute it.

While recording every layer is recomputed, so whatever fits with full recomputation can be recorded. A storage belongs
to the layer parts whose recomputation saved it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .saved_tensors import Tracker

# Parts of a layer in order, and the whole layer.
INPUT_NORM, ATTENTION, MLP_NORM, ACTIVATION, MLP = "input_norm", "attention", "mlp_norm", "activation", "mlp"
EXPERTS, SHARED, SHARED_ACTIVATION = "experts", "shared_experts", "shared_activation"
LAYER = "layer"
# Part -> all nested parts.
INSIDE = {MLP: {EXPERTS, ACTIVATION, SHARED, SHARED_ACTIVATION}, EXPERTS: {ACTIVATION}, SHARED: {SHARED_ACTIVATION}}
BACKWARD = "backward"
NONE = -1


@dataclass
class SavedStorage:
    """A storage that a layer saves.

    parts: those that saved it; "" for the layer itself. Empty for an input that only a recomputed part would keep.
    enters, leaves: the norm, activation or experts it is an input of, the norm or activation it is the output of, or
    "".
    is_shared: also saved by other layers or micro-batches (e.g. a mask).
    """

    bytes: int
    parts: set[str] = field(default_factory=set)
    enters: str = ""
    leaves: str = ""
    is_shared: bool = False


@dataclass
class LayerRecord:
    """Storages one layer saves per micro-batch, and forward seconds of its parts.

    follower: next layer in the same pass; NONE for the last. is_first: the caller holds its input.
    """

    storages: list[SavedStorage] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    follower: int = NONE
    is_first: bool = False

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.storages if each.parts and not each.is_shared)

    def cost(self, part: str) -> float:
        found = self.seconds.get(part)
        return statistics.median(found) if found else 0.0


class Instant(NamedTuple):
    """The running layer, and kept micro-batches per layer."""

    layer: int
    counts: tuple[int, ...]
    is_forward: bool = False


class LayerRecorder(Tracker):
    def __init__(self, count: int, is_excluded: Callable[[int], bool], synchronize: Callable[[], None]) -> None:
        super().__init__(is_excluded)
        self.layers = [LayerRecord() for _ in range(count)]
        self._outside: dict[Instant, int] = {}
        self._synchronize = synchronize
        self._kept = [0] * count
        # : Last layer of the running pass; last recomputed layer and its time.
        self._before: int | None = None
        self._ended: tuple[int, float] = (NONE, 0.0)
        # : Key -> what recomputations saved of a living storage; bytes of those saved by several.
        self._saved_by: dict[int, tuple[StorageWeakRef, list[SavedStorage]]] = {}
        self._shared: dict[int, int] = {}
        self._most_shared = 0
        self._is_inside, self._again = False, -1
        # : Keys of storages that layers saved.
        self._of_layers: set[int] = set()
        self._saved: dict[int, SavedStorage] = {}
        self._ends: dict[int, tuple[str, str]] = {}
        self._given: set[int] = set()
        self._parts: list[tuple[str, float]] = []
        self._sums: dict[str, float] = {}
        # : Keeps marked tensors alive, so that their keys stay unique.
        self._held: list[torch.Tensor] = []

    @property
    def moments(self) -> dict[Instant, int]:
        """Moment -> maximum bytes saved outside of layers or by several."""
        return {moment: size + self._most_shared for moment, size in self._outside.items()}

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        before, self._before = self._before, NONE
        try:
            yield
        finally:
            self._before = before

    @contextlib.contextmanager
    def forward(self, layer: int) -> Iterator[None]:
        """Context of a forward pass that saves only its input."""
        self._kept[layer] += 1
        self._look(layer, is_forward=True)
        if self._before is not None:
            self.layers[layer].is_first = self._before == NONE
            if self._before != NONE:
                self.layers[self._before].follower = layer
            self._before = layer
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    @contextlib.contextmanager
    def again(self, layer: int, hidden: torch.Tensor, given: Iterable[torch.Tensor]) -> Iterator[None]:
        """Context manager around a recomputation; `given`: inputs that the layer does not own."""
        self._time_backward(layer)
        self._look(layer)
        self._kept[layer] -= 1
        self._saved_by = {
            key: each
            for key, each in self._saved_by.items()
            if not each[0].expired()  # type: ignore[no-untyped-call]
        }
        self._shared = {key: size for key, size in self._shared.items() if key in self._saved_by}
        self._saved, self._ends, self._parts, self._sums, self._held = {}, {}, [], {}, []
        self._given = {each.untyped_storage()._cdata for each in given}
        self._is_inside, self._again = True, layer
        try:
            self._mark(INPUT_NORM, hidden, is_input=True)
            self.enter(LAYER)
            yield
            self.leave(LAYER)
        finally:
            self._is_inside, self._again = False, -1
        self._finish(layer)
        self._held = []
        self._ended = (layer, self._now())

    def _time_backward(self, layer: int) -> None:
        ended, at = self._ended
        if ended != NONE and self.layers[layer].follower == ended:
            self.layers[ended].seconds.setdefault(BACKWARD, []).append(self._now() - at)
        self._ended = (NONE, 0.0)

    def _finish(self, layer: int) -> None:
        record = self.layers[layer]
        for part, seconds in self._sums.items():
            record.seconds.setdefault(part, []).append(seconds)
        for key, saved in self._saved.items():
            saved.enters, saved.leaves = self._ends.get(key, ("", ""))
        found = LayerRecord(list(self._saved.values()), record.seconds, record.follower, record.is_first)
        # Keep the largest micro-batch: a router spreads tokens unevenly.
        if found.bytes >= record.bytes:
            self.layers[layer] = found

    def enter(self, part: str, *entered: torch.Tensor | None) -> None:
        if self._again >= 0:
            for each in entered:
                self._mark(part, each, is_input=True)
            self._parts.append((part, self._now()))

    def leave(self, part: str, left: torch.Tensor | None = None) -> None:
        if self._again >= 0 and self._parts and self._parts[-1][0] == part:
            _, began = self._parts.pop()
            self._sums[part] = self._sums.get(part, 0.0) + self._now() - began
            self._mark(part, left, is_input=False)

    def _mark(self, part: str, tensor: torch.Tensor | None, is_input: bool) -> None:
        if tensor is not None:
            key = tensor.untyped_storage()._cdata
            enters, leaves = self._ends.get(key, ("", ""))
            self._ends[key] = (enters or part, leaves) if is_input else (enters, leaves or part)
            self._held.append(tensor)
            if is_input:
                self._saved.setdefault(key, SavedStorage(tensor.untyped_storage().nbytes()))

    def _now(self) -> float:
        self._synchronize()
        return time.perf_counter()

    def _look(self, layer: int, is_forward: bool = False) -> None:
        outside = sum(each.storage.nbytes() for key, each in self._live.items() if key not in self._of_layers)
        moment = Instant(layer, tuple(self._kept), is_forward)
        self._outside[moment] = max(outside, self._outside.get(moment, 0))

    def pack(self, tensor: torch.Tensor) -> Any:
        packed = super().pack(tensor)
        if packed is tensor:
            return packed
        key = tensor.untyped_storage()._cdata
        if not self._is_inside:
            self._look(NONE)
            if self._before is not None and self._before != NONE:
                # A norm after the layers, while the last but one is still being copied.
                self._look(self._before, is_forward=True)
        elif key not in self._given:
            self._of_layers.add(key)
            if self._again >= 0:
                saved = self._saved.setdefault(key, SavedStorage(tensor.untyped_storage().nbytes()))
                saved.parts.add(self._parts[-1][0] if self._parts[-1][0] != LAYER else "")
                self._meet(key, tensor.untyped_storage(), saved)
        return packed

    def _meet(self, key: int, storage: torch.UntypedStorage, saved: SavedStorage) -> None:
        _, several = self._saved_by.setdefault(key, (StorageWeakRef(storage), []))  # type: ignore[no-untyped-call]
        if all(each is not saved for each in several):
            several.append(saved)
        if len(several) > 1:
            for each in several:
                each.is_shared = True
            self._shared[key] = saved.bytes
            self._most_shared = max(self._most_shared, sum(self._shared.values()))

    def release(self, key: int) -> None:
        super().release(key)
        if key not in self._live:
            self._of_layers.discard(key)
