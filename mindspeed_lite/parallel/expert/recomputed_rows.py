"""Rows of tokens that experts were given, released after use and exchanged again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed_lite.memory.released import ReleasedTensor

from .exchange import Collective, Messages


class RecomputedRows:
    """The rows of one layer and micro-batch.

        rows.release(x)    forward, when the first product has read x [rows, hidden]
        rows.leave()       backward, when there is something to hide a message behind
        rows.arrive()      before x is read: waits, puts the rows in order, fills x

    Every rank of the group calls `leave` at the same place among its collectives, with rows or without.

    Args:
        permute: the rows that this rank sends, from what it has kept.
        collective: how they travel; None where they stay.
        order: what was received, as the experts were given it.
    """

    def __init__(
        self,
        permute: Callable[[], torch.Tensor],
        collective: Collective | None,
        order: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._permute, self._collective, self._order = permute, collective, order
        self._messages = Messages()
        self._released: ReleasedTensor | None = None
        self._received: torch.Tensor | None = None

    def release(self, x: torch.Tensor) -> None:
        """Give the memory of x up."""
        self._released = ReleasedTensor(x)

    @torch.no_grad()
    def leave(self) -> None:
        """Let the rows leave, once."""
        if self._released is None or self._received is not None:
            return
        rows = self._permute()
        self._received = rows if self._collective is None else self._messages.send(rows, self._collective)

    @torch.no_grad()
    def arrive(self) -> None:
        """Fill what was released, once."""
        self.leave()
        if self._released is None or self._received is None:
            return
        self._messages.wait()
        released, received = self._released, self._received
        self._released = self._received = None
        released.fill(self._order(received))
