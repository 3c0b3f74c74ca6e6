"""Copies between a device and buffers of its host that run beside compute, one lane out and one lane back.

Nothing here waits on the host: every order is one of streams, kept by marks. `Streams` is the link of CUDA and NPU;
whatever has its methods can stand in its place.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

# Passed to a link and never looked into: an event of a stream, or what a link has instead.
Mark = Any
# A buffer may be larger than asked for by this factor, so that sizes which differ a little share buffers.
_SLACK = 1.25


class Buffer:
    """Bytes of host memory that a copy goes into, and the last copy that touched them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.last: Mark | None = None


class Link(Protocol):
    """Copies in both directions; each begins when the compute that was issued before it is done."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 tensor of the host, which copies run from and to fastest. Raises MemoryError or RuntimeError."""
        ...

    def out(self, source: torch.Tensor, buffer: Buffer) -> Mark:
        """Copy the bytes of a contiguous uint8 tensor of the device into the buffer's first ones."""
        ...

    def back(self, buffer: Buffer, target: torch.Tensor) -> Mark:
        """Copy the buffer's first bytes into a contiguous uint8 tensor of the device."""
        ...

    def wait(self, mark: Mark) -> None:
        """Let the compute that is issued after this begin when the copy of the mark is done."""
        ...


class Streams:
    """A link of two streams of the device.

    Args:
        device: "cuda" or "npu", with an index or without.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._lanes = {name: self._module.Stream(device=device) for name in ("out", "back")}

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def out(self, source: torch.Tensor, buffer: Buffer) -> Mark:
        return self._copy("out", source, buffer.tensor[: source.numel()], buffer)

    def back(self, buffer: Buffer, target: torch.Tensor) -> Mark:
        return self._copy("back", buffer.tensor[: target.numel()], target, buffer)

    def wait(self, mark: Mark) -> None:
        self._compute().wait_event(mark)

    def _copy(self, lane: str, source: torch.Tensor, target: torch.Tensor, buffer: Buffer) -> Mark:
        stream = self._lanes[lane]
        # What is read has been computed then, and memory that is written is not in use by earlier compute any more.
        stream.wait_event(self._compute().record_event())
        if buffer.last is not None:
            stream.wait_event(buffer.last)
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)
        buffer.last = stream.record_event()
        return buffer.last

    def _compute(self) -> Any:
        return self._module.current_stream(self._device)


class Pool:
    """Buffers of a link that are used again, since host memory for fast copies is slow to get.

    Args:
        link: where buffers come from.
        budget: bytes of all buffers together, in use or not; None for no limit.
    """

    def __init__(self, link: Link, budget: int | None = None) -> None:
        self._link = link
        self._budget = budget
        self._free: list[Buffer] = []
        self.nbytes = 0

    def take(self, nbytes: int) -> Buffer:
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
            buffer = Buffer(self._link.allocate(nbytes))
        except RuntimeError as error:
            raise MemoryError(f"no {nbytes:,} bytes of host memory: {error}") from error
        self.nbytes += nbytes
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Give a buffer back. A copy of it may still run: the next one waits for it."""
        self._free.append(buffer)

    def _make_room(self, nbytes: int) -> None:
        """Let go of buffers that nobody uses if the budget has no room beside them, the largest first."""
        if self._budget is None:
            return
        self._free.sort(key=lambda each: each.tensor.numel())
        while self._free and self.nbytes + nbytes > self._budget:
            self.nbytes -= self._free.pop().tensor.numel()
        if self.nbytes + nbytes > self._budget:
            raise MemoryError(f"{nbytes:,} bytes more than the budget of {self._budget:,} bytes of host memory allows")


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]
