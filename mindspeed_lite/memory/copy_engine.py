"""Asynchronous copies between a device and pinned host buffers, ordered by events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from mindspeed_lite.platform.side_stream import DeviceStream, Event
from mindspeed_lite.platform.timer import seconds_of

# Bytes of the smallest piece.
_SMALLEST = 4096


class PinnedPiece:
    """Pinned memory of a power of two, and the last copy from or to it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.last: Event | None = None


class Buffer:
    """Pinned memory in pieces: a host allocator rounds each allocation up to a power of two."""

    def __init__(self, pieces: Sequence[PinnedPiece]) -> None:
        self.pieces = pieces

    @property
    def nbytes(self) -> int:
        return sum(piece.tensor.numel() for piece in self.pieces)

    def write(self, source: torch.Tensor) -> None:
        for held, part in self._pairs(source):
            held.copy_(part, non_blocking=True)

    def read(self, target: torch.Tensor) -> None:
        for held, part in self._pairs(target):
            part.copy_(held, non_blocking=True)

    def copied_by(self, copy: Callable[[list[Event]], Event]) -> Event:
        """Issue `copy` after the given copies from or to the pieces."""
        event = copy([piece.last for piece in self.pieces if piece.last is not None])
        for piece in self.pieces:
            piece.last = event
        return event

    def _pairs(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 0
        for piece in self.pieces:
            part = tensor[start : start + piece.tensor.numel()]
            yield piece.tensor[: part.numel()], part
            start += piece.tensor.numel()


class CopyEngine:
    """Asynchronous host copies, one stream per direction, ordered after previously issued compute."""

    def __init__(self, device: torch.device) -> None:
        self._d2h, self._h2d = DeviceStream(device), DeviceStream(device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Pinned uint8 tensor. Raises MemoryError or RuntimeError."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def d2h(self, source: torch.Tensor, buffer: Buffer) -> Event:
        """Copy a contiguous uint8 device tensor into the first bytes of `buffer`."""
        return buffer.copied_by(lambda after: self._d2h.run(lambda: buffer.write(source), after))

    def h2d(self, buffer: Buffer, target: torch.Tensor) -> Event:
        """Copy the first bytes of `buffer` to a contiguous uint8 device tensor."""
        return buffer.copied_by(lambda after: self._h2d.run(lambda: buffer.read(target), after))

    def wait(self, event: Event) -> None:
        """Makes later compute wait for the copy."""
        self._d2h.wait(event)


class PinnedBufferPool:
    """Buffers of reused pieces; budget: bytes that are pinned, None for no limit."""

    def __init__(self, engine: CopyEngine, budget: int | None = None) -> None:
        self._engine = engine
        self._budget = budget
        self._free: list[PinnedPiece] = []
        self.nbytes = 0

    def acquire(self, nbytes: int) -> Buffer:
        """Buffer of at least `nbytes`. Raises MemoryError."""
        found, missing = self._matching(nbytes)
        if not self._has_room(missing):
            found, missing = self._any(nbytes)
        if not self._has_room(missing):
            raise MemoryError(f"{nbytes:,} bytes more than the budget of {self._budget:,} bytes of host memory allows")
        try:
            made = [PinnedPiece(self._engine.allocate(each)) for each in missing]
        except RuntimeError as error:
            raise MemoryError(f"no {nbytes:,} bytes of host memory: {error}") from error
        self.nbytes += sum(missing)
        for piece in found:  # in place: a collected record may release its buffer at any time
            self._free.remove(piece)
        return Buffer(found + made)

    def _matching(self, nbytes: int) -> tuple[list[PinnedPiece], list[int]]:
        """Free pieces of the sizes that `nbytes` takes, and the sizes of others."""
        missing, found = _sizes(nbytes), []
        for piece in self._free:
            if piece.tensor.numel() in missing:
                missing.remove(piece.tensor.numel())
                found.append(piece)
        return found, missing

    def _any(self, nbytes: int) -> tuple[list[PinnedPiece], list[int]]:
        """The smallest free piece that holds `nbytes`, else the largest ones, and the sizes of others."""
        fitting = [piece for piece in self._free if piece.tensor.numel() >= nbytes]
        if fitting:
            return [min(fitting, key=lambda each: each.tensor.numel())], []
        found, rest = [], nbytes
        for piece in sorted(self._free, key=lambda each: each.tensor.numel(), reverse=True):
            if rest > 0:
                found.append(piece)
                rest -= piece.tensor.numel()
        return found, _sizes(rest) if rest > 0 else []

    def _has_room(self, sizes: list[int]) -> bool:
        return not sizes or self._budget is None or self.nbytes + sum(sizes) <= self._budget

    def release(self, buffer: Buffer) -> None:
        self._free += buffer.pieces


def _sizes(nbytes: int) -> list[int]:
    """At most four powers of two that hold `nbytes` and at most an eighth more."""
    unit = max(_SMALLEST, (1 << max(nbytes, 1).bit_length() - 1) // 8)
    units = -(-nbytes // unit)
    return [unit << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]


# Per direction; the first allocates.
_TIMED_COPIES = 3


def bandwidths(engine: CopyEngine, device: torch.device, nbytes: int) -> tuple[float, float]:
    """Fastest bytes per second to the host and back. Raises MemoryError or RuntimeError."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    buffer = Buffer([PinnedPiece(engine.allocate(nbytes))])

    def seconds(copy: Callable[[], Event]) -> float:
        return min(seconds_of(lambda: engine.wait(copy()), device) for _ in range(_TIMED_COPIES))

    out, back = seconds(lambda: engine.d2h(source, buffer)), seconds(lambda: engine.h2d(buffer, source))
    return nbytes / out, nbytes / back


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]
