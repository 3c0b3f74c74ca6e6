"""Caches values computed from a tensor while its storage lives and is not written to.

All layers of a model ask for the same few, such as cos and sin of one tensor of angles, through slices or detached
copies. Storage and version identify the contents.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")

# Storages at a time, and values of one of them: beyond that a caller makes new ones at each call.
_STORAGES = 32
_VALUES = 16


class _Entry:
    """What is kept for one storage. The weak reference also keeps its address from being given to another."""

    def __init__(self, source: torch.Tensor) -> None:
        self.storage = StorageWeakRef(source.untyped_storage())  # type: ignore[no-untyped-call]
        self.version = source._version
        self.values: dict[Hashable, Any] = {}


class StorageVersionCache:
    """A cache keyed by storage and version; a hit costs a few dictionary lookups."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def get(self, source: torch.Tensor, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned for `source` as it is now and `key`, or what it returns."""
        if torch.compiler.is_compiling() or source.is_inference():
            # A graph has its own values, and writes to an inference tensor are not counted.
            return make()
        address = source.untyped_storage()._cdata
        full = (key, source.storage_offset(), source.shape, source.stride(), source.dtype)
        entry = self._entries.get(address)
        if entry is not None and entry.version == source._version:
            value: T | None = entry.values.get(full)
            if value is not None:
                return value
        # What is kept must serve a backward pass too, even if inference asks first.
        with torch.inference_mode(False), torch.no_grad():
            made = make()
        if source.is_cuda and torch.cuda.is_current_stream_capturing():
            return made  # it has no contents until the graph runs
        if entry is None or entry.version != source._version:
            self._make_room()
            entry = self._entries[address] = _Entry(source)
        if len(entry.values) >= _VALUES:
            entry.values.clear()
        entry.values[full] = made
        return made

    def _make_room(self) -> None:
        for address, entry in list(self._entries.items()):
            if entry.storage.expired():  # type: ignore[no-untyped-call]
                self._entries.pop(address, None)
        while len(self._entries) >= _STORAGES:
            self._entries.pop(next(iter(self._entries)), None)
