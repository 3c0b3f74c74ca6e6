"""Expert input rows, freed after use and exchanged again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mindspeed_lite.memory.saved_tensors import ReleasedTensor

from .exchange import Collective, Messages


class RecomputedRows:
    """Rows of one layer and micro-batch.

        rows.release(x)    forward, after the first GEMM has read x [rows, hidden]
        rows.leave()       backward, before work that overlaps with the message
        rows.arrive()      before x is read: waits, sorts the rows, fills x

    All ranks call `leave` at the same place among their collectives.

    Args:
        permute: makes the outgoing rows.
        collective: None if rows stay.
        order: sorts received rows by expert.
    """

    def __init__(
        self, permute: Callable[[], Tensor], collective: Collective | None, order: Callable[[Tensor], Tensor]
    ) -> None:
        self._permute, self._collective, self._order = permute, collective, order
        self._messages = Messages()
        self._released: ReleasedTensor | None = None
        self._received: Tensor | None = None

    def release(self, x: Tensor) -> None:
        self._released = ReleasedTensor(x)

    @torch.no_grad()
    def leave(self) -> None:
        if self._released is None or self._received is not None:
            return
        rows = self._permute()
        self._received = rows if self._collective is None else self._messages.send(rows, self._collective)

    @torch.no_grad()
    def arrive(self) -> None:
        self.leave()
        if self._released is None or self._received is None:
            return
        self._messages.wait()
        released, received = self._released, self._received
        self._released = self._received = None
        released.fill(self._order(received))
