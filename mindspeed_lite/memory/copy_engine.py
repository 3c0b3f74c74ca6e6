"""Copies between a device and pinned host buffers beside compute, one stream in each direction.

Nothing here blocks the host: every order is one of streams, kept by events. `StreamCopyEngine` serves CUDA and NPU;
any object with the methods of `CopyEngine` can take its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from mindspeed_lite.platform.side_stream import DeviceStream, Event

# A buffer may be larger than asked for by this factor, so that sizes which differ a little share buffers.
_SLACK = 1.25


class Buffer:
    """Bytes of host memory that a copy goes into, and the last copy that touched them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.last: Event | None = None


class CopyEngine(Protocol):
    """Copies in both directions; each begins when the compute that was issued before it is done."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 tensor of the host, which copies run from and to fastest. Raises MemoryError or RuntimeError."""
        ...

    def d2h(self, source: torch.Tensor, buffer: Buffer) -> Event:
        """Copy the bytes of a contiguous uint8 tensor of the device into the buffer's first ones."""
        ...

    def h2d(self, buffer: Buffer, target: torch.Tensor) -> Event:
        """Copy the buffer's first bytes into a contiguous uint8 tensor of the device."""
        ...

    def wait(self, event: Event) -> None:
        """Let the compute that is issued after this begin when the copy of the event is done."""
        ...


class StreamCopyEngine:
    """A copy engine of two streams of a CUDA device or NPU, one for each direction.

    Args:
        device: "cuda" or "npu", with an index or without.
    """

    def __init__(self, device: torch.device) -> None:
        self._d2h, self._h2d = DeviceStream(device), DeviceStream(device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def d2h(self, source: torch.Tensor, buffer: Buffer) -> Event:
        return _copy(self._d2h, source, buffer.tensor[: source.numel()], buffer)

    def h2d(self, buffer: Buffer, target: torch.Tensor) -> Event:
        return _copy(self._h2d, buffer.tensor[: target.numel()], target, buffer)

    def wait(self, event: Event) -> None:
        self._d2h.wait(event)


def _copy(stream: DeviceStream, source: torch.Tensor, target: torch.Tensor, buffer: Buffer) -> Event:
    # What is read has been computed by then, and memory that is written is not in use by earlier compute any more.
    buffer.last = stream.run(lambda: target.copy_(source, non_blocking=True), after=buffer.last)
    return buffer.last


class PinnedBufferPool:
    """Pinned buffers of a copy engine, used again because pinned memory is slow to allocate.

    Args:
        engine: allocates the buffers.
        budget: bytes of all buffers together, in use or not; None for no limit.
    """

    def __init__(self, engine: CopyEngine, budget: int | None = None) -> None:
        self._engine = engine
        self._budget = budget
        self._free: list[Buffer] = []
        self.nbytes = 0

    def acquire(self, nbytes: int) -> Buffer:
        """A buffer of at least so many bytes.

        Raises:
            MemoryError: the budget or the host has no room; buffers that are in use stay as they are.
        """
        fitting = [each for each in self._free if nbytes <= each.tensor.numel() <= max(nbytes * _SLACK, nbytes + 4096)]
        if fitting:
            found = min(fitting, key=lambda each: each.tensor.numel())
            self._free.remove(found)
            return found
        self._make_room(nbytes)
        try:
            buffer = Buffer(self._engine.allocate(nbytes))
        except RuntimeError as error:
            raise MemoryError(f"no {nbytes:,} bytes of host memory: {error}") from error
        self.nbytes += nbytes
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Give a buffer back. A copy of it may still run: the next one waits for it."""
        self._free.append(buffer)

    def _make_room(self, nbytes: int) -> None:
        """Free unused buffers if the budget has no room beside them, the largest first."""
        if self._budget is None:
            return
        self._free.sort(key=lambda each: each.tensor.numel())
        while self._free and self.nbytes + nbytes > self._budget:
            self.nbytes -= self._free.pop().tensor.numel()
        if self.nbytes + nbytes > self._budget:
            raise MemoryError(f"{nbytes:,} bytes more than the budget of {self._budget:,} bytes of host memory allows")


# Of copies in each direction that are timed, the first of which takes buffers for the first time.
_TIMED_COPIES = 3


def bandwidths(
    engine: CopyEngine, device: torch.device, nbytes: int, synchronize: Callable[[], None]
) -> tuple[float, float]:
    """Bytes a second to the host and back, of the fastest of a few copies of `nbytes` with nothing beside them.

    Raises:
        MemoryError, RuntimeError: the host or the device has no room.
    """
    source, buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device), Buffer(engine.allocate(nbytes))

    def seconds(copy: Callable[[], Event]) -> float:
        synchronize()
        begin = time.perf_counter()
        engine.wait(copy())
        synchronize()
        return time.perf_counter() - begin

    out = min(seconds(lambda: engine.d2h(source, buffer)) for _ in range(_TIMED_COPIES))
    back = min(seconds(lambda: engine.h2d(buffer, source)) for _ in range(_TIMED_COPIES))
    return nbytes / out, nbytes / back


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]
