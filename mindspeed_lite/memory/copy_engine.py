"""Asynchronous copies between a device and pinned host buffers, ordered by events."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mindspeed_lite.platform.side_stream import DeviceStream, Event

# Similar sizes share buffers up to this ratio.
_SLACK = 1.25


class Buffer:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.last: Event | None = None


class CopyEngine:
    """Asynchronous host copies, one stream per direction, ordered after previously issued compute."""

    def __init__(self, device: torch.device) -> None:
        self._d2h, self._h2d = DeviceStream(device), DeviceStream(device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Pinned uint8 tensor. Raises MemoryError or RuntimeError."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def d2h(self, source: torch.Tensor, buffer: Buffer) -> Event:
        """Copy a contiguous uint8 device tensor into the first bytes of `buffer`."""
        return _copy(self._d2h, source, buffer.tensor[: source.numel()], buffer)

    def h2d(self, buffer: Buffer, target: torch.Tensor) -> Event:
        """Copy the first bytes of `buffer` to a contiguous uint8 device tensor."""
        return _copy(self._h2d, buffer.tensor[: target.numel()], target, buffer)

    def wait(self, event: Event) -> None:
        """Makes later compute wait for the copy."""
        self._d2h.wait(event)


def _copy(stream: DeviceStream, source: torch.Tensor, target: torch.Tensor, buffer: Buffer) -> Event:
    buffer.last = stream.run(lambda: target.copy_(source, non_blocking=True), after=buffer.last)
    return buffer.last


class PinnedBufferPool:
    """Reuses pinned buffers; budget: total bytes, None for no limit."""

    def __init__(self, engine: CopyEngine, budget: int | None = None) -> None:
        self._engine = engine
        self._budget = budget
        self._free: list[Buffer] = []
        self.nbytes = 0

    def acquire(self, nbytes: int) -> Buffer:
        """Buffer of at least `nbytes`. Raises MemoryError."""
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
        self._free.append(buffer)

    def _make_room(self, nbytes: int) -> None:
        if self._budget is None:
            return
        self._free.sort(key=lambda each: each.tensor.numel())
        while self._free and self.nbytes + nbytes > self._budget:
            self.nbytes -= self._free.pop().tensor.numel()
        if self.nbytes + nbytes > self._budget:
            raise MemoryError(f"{nbytes:,} bytes more than the budget of {self._budget:,} bytes of host memory allows")


# Per direction; the first allocates.
_TIMED_COPIES = 3


def bandwidths(
    engine: CopyEngine, device: torch.device, nbytes: int, synchronize: Callable[[], None]
) -> tuple[float, float]:
    """Fastest bytes per second to the host and back. Raises MemoryError or RuntimeError."""
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
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]
