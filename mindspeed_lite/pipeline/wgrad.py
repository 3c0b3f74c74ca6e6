"""Queues of deferred weight gradients; their inputs stay in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence


class WgradQueue:
    """Deferred weight gradients of one layer, oldest first.

    is_kept: ignore the layer's compute requests; a schedule computes them later.
    """

    def __init__(self) -> None:
        self.is_kept = False
        self._waiting: deque[Callable[[], None]] = deque()
        self._hooks: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, compute: Callable[[], None]) -> None:
        """Defer a gradient; `compute` accumulates it."""
        self._waiting.append(compute)

    @property
    def hooks(self) -> tuple[Callable[[], object], ...]:
        return tuple(self._hooks)

    def call_when_done(self, hook: Callable[[], object]) -> None:
        """Register a hook, e.g. to reduce the gradients."""
        self._hooks.append(hook)

    def drain(self, announce: bool = True, most: int | None = None) -> int:
        """Compute all or `most` gradients, call the hooks; returns the number."""
        count = len(self._waiting) if most is None else most
        for _ in range(count):
            self._waiting.popleft()()
        # Once, not per micro-batch.
        for hook in self._hooks if count and announce else ():
            hook()
        return count


class WgradBatches:
    """One batch of several layers' weight gradients per backward pass."""

    def __init__(self, queues: Sequence[WgradQueue]) -> None:
        self._queues = tuple(queues)
        self._batches: deque[list[int]] = deque()
        self._sealed = [0] * len(self._queues)

    def __len__(self) -> int:
        return len(self._batches)

    def seal(self) -> None:
        lengths = list(map(len, self._queues))
        self._batches.append([length - before for length, before in zip(lengths, self._sealed, strict=True)])
        self._sealed = lengths

    def run(self, announce: bool) -> None:
        """Compute the oldest batch; `announce`: then call the hooks."""
        batch = self._batches.popleft()
        for queue, count in zip(self._queues, batch, strict=True):
            queue.drain(announce, count)
        self._sealed = [before - count for before, count in zip(self._sealed, batch, strict=True)]
