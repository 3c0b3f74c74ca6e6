"""Weight gradients put aside in the backward pass, to be computed where a schedule has time for them.

The backward pass of a layer is two products: the gradient of its input, for which the layer before it waits, and the
gradient of its weight, for which nobody waits until gradients are reduced. What the second needs stays in memory
meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class WgradQueue:
    """The weight gradients of one layer that are still to be computed, the oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._hooks: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, compute: Callable[[], None]) -> None:
        """Put a gradient aside; `compute` adds it to where it is accumulated."""
        self._waiting.append(compute)

    def call_after_each(self, hook: Callable[[], object]) -> None:
        """Call `hook` whenever a gradient is there, for whoever reduces it."""
        self._hooks.append(hook)

    def run_oldest(self) -> None:
        """Compute the oldest one; IndexError if there is none."""
        self._waiting.popleft()()
        for hook in self._hooks:
            hook()

    def drain(self) -> int:
        """Compute all of them; returns how many there were."""
        count = len(self._waiting)
        while self._waiting:
            self.run_oldest()
        return count
