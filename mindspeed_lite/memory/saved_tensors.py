"""Counts bytes that autograd saves for the backward pass, and releases some until then.

A storage counts once, with its current size. The peak is evaluated when a backward pass begins to read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

_Hooks = torch.autograd.graph.saved_tensors_hooks


@dataclass(frozen=True)
class SavedTensorStats:
    """Bytes saved at the peak by one place: calling functions, innermost first, without torch's own."""

    where: tuple[str, ...]
    module: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


@dataclass
class _Storage:
    storage: torch.UntypedStorage
    where: tuple[str, ...]
    module: str
    shape: tuple[int, ...]
    dtype: str
    references: int = 0


@dataclass
class Tracker:
    """Counts saved storages within its `with` block.

    is_excluded: True for the `_cdata` of storages not to count, e.g. of parameters and gradient buffers.
    counts_fake: counts tensors without storage.
    module: path of the module that runs, if known.
    peak: bytes.
    """

    is_excluded: Callable[[int], bool]
    counts_fake: bool = False
    module: Callable[[], str] = str
    peak: int = 0
    at_peak: list[SavedTensorStats] = field(default_factory=list)
    _live: dict[int, _Storage] = field(default_factory=dict)
    _has_grown: bool = False
    _hooks: Any = None

    def __enter__(self) -> Tracker:
        self._hooks = _Hooks(self.pack, self.unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self.update_peak()

    def bytes(self) -> int:
        return sum(each.storage.nbytes() for each in self._live.values())

    def update_peak(self) -> None:
        self._has_grown = False
        now = self.bytes()
        if now > self.peak:
            self.peak = now
            self.at_peak = _by_place(self._live.values())

    def pack(self, tensor: torch.Tensor) -> _Reference | torch.Tensor:
        is_traced = isinstance(tensor, torch._subclasses.FakeTensor) and not self.counts_fake
        if tensor.layout != torch.strided or is_traced:
            return tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live and self.is_excluded(key):
            return tensor
        self.hold(storage, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        return _Reference(self, key, tensor)

    def hold(self, storage: torch.UntypedStorage, shape: tuple[int, ...], dtype: str) -> int:
        """Counts a storage until `release` of the returned key."""
        # Stable, unlike its memory address.
        key: int = storage._cdata
        known = self._live.get(key)
        if known is None:
            known = self._live[key] = _Storage(storage, _place(), self.module(), shape, dtype)
            self._has_grown = True
        known.references += 1
        return key

    def unpack(self, packed: _Reference | torch.Tensor) -> torch.Tensor:
        if self._has_grown:
            self.update_peak()
        return packed.tensor if isinstance(packed, _Reference) else packed

    def release(self, key: int) -> None:
        if self._has_grown:
            self.update_peak()
        known = self._live[key]
        known.references -= 1
        if not known.references:
            del self._live[key]


class _Reference:
    __slots__ = ("key", "tensor", "tracker")

    def __init__(self, tracker: Tracker, key: int, tensor: torch.Tensor) -> None:
        self.tracker, self.key, self.tensor = tracker, key, tensor

    def __del__(self) -> None:
        self.tracker.release(self.key)


def _place(depth: int = 4) -> tuple[str, ...]:
    found: list[str] = []
    frame = sys._getframe(3)
    while frame is not None and len(found) < depth:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] != "torch":
            found.append(f"{name}:{frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def _by_place(storages: Iterable[_Storage]) -> list[SavedTensorStats]:
    sums: dict[tuple[tuple[str, ...], str, tuple[int, ...], str], tuple[int, int]] = {}
    for each in storages:
        key = (each.where, each.module, each.shape, each.dtype)
        count, size = sums.get(key, (0, 0))
        sums[key] = (count + 1, size + each.storage.nbytes())
    kept = [SavedTensorStats(*key, count, size) for key, (count, size) in sums.items()]
    return sorted(kept, key=lambda each: -each.bytes)


class ReleasedTensor:
    """Tensor whose storage is empty until `fill`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # `.data` has its own version counter, so `fill` does not modify a saved tensor.
        self._values = tensor.data
        self._bytes = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)

    def fill(self, values: torch.Tensor) -> None:
        self._values.untyped_storage().resize_(self._bytes)
        self._values.copy_(values)
