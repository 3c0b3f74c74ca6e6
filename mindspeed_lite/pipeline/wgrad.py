"""Queues weight gradients of the backward pass until the schedule has time for them.

The backward pass of a layer is two products: the gradient of its input, for which the layer before it waits, and the
gradient of its weight, for which nothing waits until gradients are reduced. What the second needs stays in memory
meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence


class WgradQueue:
    """The weight gradients of one layer that are still to be computed, the oldest first.

    is_kept: what asks the layer for them is to be ignored; a schedule computes them later.
    """

    def __init__(self) -> None:
        self.is_kept = False
        self._waiting: deque[Callable[[], None]] = deque()
        self._hooks: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, compute: Callable[[], None]) -> None:
        """Put a gradient aside; `compute` adds it to where it is accumulated."""
        self._waiting.append(compute)

    @property
    def hooks(self) -> tuple[Callable[[], object], ...]:
        """What is called when gradients are there."""
        return tuple(self._hooks)

    def call_when_done(self, hook: Callable[[], object]) -> None:
        """Call `hook` whenever the gradients that were put aside are there, so that they can be reduced."""
        self._hooks.append(hook)

    def drain(self, announce: bool = True, most: int | None = None) -> int:
        """Compute all of them or `most`, the oldest first, and call the hooks; returns how many."""
        count = len(self._waiting) if most is None else most
        for _ in range(count):
            self._waiting.popleft()()
        # Once: those of earlier micro-batches are not reduced apart.
        for hook in self._hooks if count and announce else ():
            hook()
        return count


class WgradBatches:
    """The weight gradients of several layers in batches: one for each backward pass, the oldest first."""

    def __init__(self, queues: Sequence[WgradQueue]) -> None:
        self._queues = tuple(queues)
        self._batches: deque[list[int]] = deque()
        self._sealed = [0] * len(self._queues)

    def __len__(self) -> int:
        return len(self._batches)

    def seal(self) -> None:
        """Make what has been queued since the last call one batch."""
        lengths = list(map(len, self._queues))
        self._batches.append([length - before for length, before in zip(lengths, self._sealed, strict=True)])
        self._sealed = lengths

    def run(self, announce: bool) -> None:
        """Compute the oldest batch; `announce`: then call the hooks of its queues."""
        batch = self._batches.popleft()
        for queue, count in zip(self._queues, batch, strict=True):
            queue.drain(announce, count)
        self._sealed = [before - count for before, count in zip(self._sealed, batch, strict=True)]
