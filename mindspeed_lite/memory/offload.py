"""Offloads activations to host memory until their backward pass, overlapped with compute.

What autograd saves in one layer of a forward pass is a group; at most three are on the device in forward:

forward of layer i begins    group i-1 starts copying to the host; copied group i-2 is freed.
forward of the last ends     all copied groups are freed. The last layer stays: its backward pass comes next.
backward of layer i begins   group i-1 of the same pass starts copying back, in any order of micro-batches and chunks.
backward of layer i needs    a tensor: compute waits for its copy only.

A storage is copied once for all views; the last record that autograd drops releases the buffer. Not copied: storages
emptied for recomputation, and those referenced by other code, recognized in the next pass by storage (masks) or place
in the layer (activations).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed_lite.platform.side_stream import Event

from .copy_engine import Buffer, CopyEngine, PinnedBufferPool, as_bytes
from .saved_tensors import Tracker

# Bytes; smaller storages stay on the device.
SMALLEST = 1 << 20


class _Record:
    """A saved storage, on the device or the host."""

    def __init__(self, storage: torch.UntypedStorage, place: Hashable, pool: PinnedBufferPool) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.place = place
        self.nbytes = storage.nbytes()
        self.device = storage.device
        self.buffer: Buffer | None = None
        # : Copy to the device that compute has not waited for.
        self.pending_h2d: Event | None = None
        self._pool = pool
        self._counted: tuple[Tracker, int] | None = None

    def keep(self) -> None:
        if self.buffer is not None:
            self._pool.release(self.buffer)
            self.buffer = None

    def count(self, counter: Tracker | None) -> None:
        if counter is not None and self.storage is not None and self._counted is None:
            self._counted = counter, counter.hold(self.storage, (self.nbytes,), "uint8")

    def uncount(self) -> None:
        if self._counted is not None:
            counter, key = self._counted
            self._counted = None
            counter.release(key)

    def __del__(self) -> None:
        self.keep()
        self.uncount()


@dataclass(frozen=True)
class _Saved:
    record: _Record
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Group:
    def __init__(self, layer: Hashable, before: _Group | None) -> None:
        self.layer = layer
        self.before = before
        # Weak: records freed by autograd need not move.
        self.records: list[weakref.ref[_Record]] = []
        self.sent: Event | None = None
        # : Number of movable tensors.
        self.saved = 0

    def alive(self) -> list[_Record]:
        return [record for each in self.records if (record := each()) is not None]


class _Pass:
    def __init__(self) -> None:
        self.last: _Group | None = None
        # : Address -> record of a living device storage.
        self.there: weakref.WeakValueDictionary[int, _Record] = weakref.WeakValueDictionary()


class Offload:
    """Offloads what autograd saves within chosen modules.

    Args:
        budget: bytes of host memory; None for no limit.
        on_refusal: called once with the reason when host memory is exhausted.

    Attributes:
        counter: counts device bytes saved by autograd, or None.
    """

    def __init__(
        self,
        engine: CopyEngine,
        device: str,
        budget: int | None = None,
        on_refusal: Callable[[str], None] | None = None,
    ) -> None:
        self._engine = engine
        self._device = device
        self._pool = PinnedBufferPool(engine, budget)
        self._on_refusal = on_refusal
        self.counter: Tracker | None = None
        self._pass: _Pass | None = None
        self._group: _Group | None = None
        # : Addresses that never move: parameters, and masks shared by all layers.
        self._own: frozenset[int] = frozenset()
        self._shared: dict[int, StorageWeakRef] = {}
        # : (layer, tensor number, storage size) referenced by other code in every pass.
        self._held: set[Hashable] = set()

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        outer, self._pass = self._pass, _Pass()
        self._shared = {address: each for address, each in self._shared.items() if not each.expired()}  # type: ignore[no-untyped-call]
        try:
            yield
            if self._pass.last is not None:
                self._free(self._pass.last.before)
        finally:
            self._pass = outer

    @contextlib.contextmanager
    def layer(self, layer: Hashable, parameters: Iterable[torch.Tensor]) -> Iterator[Callable[[torch.Tensor], None]]:
        """Context of a layer's forward; yields a function for its output. Only moves in a pass."""
        current = self._pass
        if current is None or self._group is not None or not torch.is_grad_enabled():
            yield lambda output: None
            return
        before = current.last
        if before is not None:
            self._free(before.before)
            self._send(before)
        group = current.last = self._group = _Group(layer, before)
        self._own = frozenset(each.untyped_storage().data_ptr() for each in parameters)
        try:
            yield lambda output: self._on_backward(group, output)
        finally:
            self._group = None

    def saving(self) -> contextlib.AbstractContextManager[Any]:
        if self._group is None:
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        saved = self._saved(tensor)
        if isinstance(saved, _Saved):
            saved.record.count(self.counter)
            return saved
        return saved if self.counter is None else self.counter.pack(saved)

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        if self._group is None or self._pass is None or type(tensor) is not torch.Tensor:
            return tensor
        if tensor.device.type != self._device or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() < SMALLEST or address in self._own:
            return tensor
        self._group.saved += 1
        if address in self._shared and not self._shared[address].expired():  # type: ignore[no-untyped-call]
            return tensor
        record = self._pass.there.get(address)
        # The address of an emptied storage may be reused.
        if record is None or record.storage is None or record.storage.data_ptr() != address:
            place = (self._group.layer, self._group.saved, storage.nbytes())
            if place in self._held:
                return tensor
            record = self._pass.there[address] = _Record(storage, place, self._pool)
            self._group.records.append(weakref.ref(record))
        return _Saved(record, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved if isinstance(saved, torch.Tensor) else saved.tracker.unpack(saved)
        record = saved.record
        if record.storage is None:
            self._fetch(record)
        if record.pending_h2d is not None:
            self._engine.wait(record.pending_h2d)
            record.pending_h2d = None
            record.keep()
        assert record.storage is not None
        tensor = torch.empty(0, dtype=saved.dtype, device=record.device)
        return tensor.set_(record.storage, saved.offset, saved.size, saved.stride)  # type: ignore[call-overload, no-any-return]

    def _send(self, group: _Group) -> None:
        for record in group.alive():
            # Emptied for recomputation.
            if record.storage is None or record.storage.nbytes() != record.nbytes:
                continue
            try:
                record.buffer = self._pool.acquire(record.nbytes)
            except MemoryError as error:
                if self._on_refusal is not None:
                    self._on_refusal(str(error))
                    self._on_refusal = None
                continue
            group.sent = self._engine.d2h(as_bytes(record.storage), record.buffer)

    def _free(self, group: _Group | None) -> None:
        if group is None or group.sent is None:
            return
        # Copies are ordered. Compute may overwrite freed memory at once, so it waits.
        self._engine.wait(group.sent)
        group.sent = None
        for record in group.alive():
            if record.buffer is not None and record.storage is not None:
                self._let_go(record)

    def _let_go(self, record: _Record) -> None:
        assert record.storage is not None
        if record.storage.nbytes() != record.nbytes:
            record.keep()
            return
        address, reference = record.storage.data_ptr(), StorageWeakRef(record.storage)  # type: ignore[no-untyped-call]
        # A counter keeps counted storages alive.
        record.uncount()
        record.storage = None
        # Alive only if other code references it.
        held = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if held is not None:
            record.storage = held
            record.count(self.counter)
            record.keep()
            self._shared[address] = reference
            self._held.add(record.place)
        elif self._pass is not None:
            self._pass.there.pop(address, None)

    def _fetch(self, record: _Record) -> None:
        assert record.buffer is not None
        target = torch.empty(record.nbytes, dtype=torch.uint8, device=record.device)
        record.pending_h2d = self._engine.h2d(record.buffer, target)
        record.storage = target.untyped_storage()
        record.count(self.counter)

    def _on_backward(self, group: _Group, output: torch.Tensor) -> None:
        if not output.requires_grad:
            return

        def fetch(gradient: torch.Tensor) -> None:
            before, group.before = group.before, None
            if before is not None:
                for record in reversed(before.alive()):
                    if record.storage is None:
                        self._fetch(record)

        output.register_hook(fetch)  # type: ignore[no-untyped-call]
