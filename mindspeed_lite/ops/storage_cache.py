"""Caches values computed from a tensor while its storage is alive and unmodified.

Layers ask for the same values, such as cos and sin, through slices or detached copies; storage and version identify
the contents.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed_lite.ops.streams import stream_id

T = TypeVar("T")

# Cached storages, and values per storage.
_STORAGES = 32
_VALUES = 16


class _Entry:
    """Values of one storage. The weak reference keeps its address from being reused."""

    def __init__(self, source: Tensor) -> None:
        self.storage = StorageWeakRef(source.untyped_storage())  # type: ignore[no-untyped-call]
        self.version = source._version
        self.values: dict[Hashable, Any] = {}


class StorageVersionCache:
    """Cache keyed by storage, version and stream."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def get(self, source: Tensor, key: Hashable, make: Callable[[], T]) -> T:
        """Cached or new result of `make` for `source`'s contents and `key`."""
        if torch.compiler.is_compiling() or source.is_inference():
            # Compiled graphs trace it; inference tensors have no version.
            return make()
        address = source.untyped_storage()._cdata
        stream = stream_id(source.device)
        full = (key, stream, source.storage_offset(), source.shape, source.stride(), source.dtype)
        entry = self._entries.get(address)
        if entry is not None and entry.version == source._version:
            value: T | None = entry.values.get(full)
            if value is not None:
                return value
        # Backward may need it even if inference asks first.
        with torch.inference_mode(False), torch.no_grad():
            made = make()
        if source.is_cuda and torch.cuda.is_current_stream_capturing():
            return made  # no contents until the graph runs
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
