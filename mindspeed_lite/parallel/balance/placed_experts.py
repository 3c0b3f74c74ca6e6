"""The experts of one layer that change places among ranks: where they are, what they are predicted to have, moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from . import placement as placements
from .load_average import LoadAverage
from .moves import exchange

# Slot -> a context in which its tensors may be read and written.
StateOfSlot = Callable[[int], AbstractContextManager[list[torch.Tensor]]]


class PlacedExperts:
    """Experts of one layer by their places.

    Args:
        experts: of the layer, over all ranks.
        group: the ranks that they are divided among.
        device: where routing maps are.

    Attributes:
        placement: [experts], the rank of each.
        home: the placement that checkpoints and names mean.
        wanted: the placement to return to from home; None if there is none.
        average: the prediction of loads.
    """

    def __init__(self, experts: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.ranks = group, group.size()
        self.home = placements.contiguous(experts, self.ranks)
        self.placement = self.home
        self.wanted: list[int] | None = None
        self.average = LoadAverage(experts, device)
        self._index: torch.Tensor | None = None

    @property
    def is_home(self) -> bool:
        return self.placement == self.home

    @property
    def intended(self) -> list[int]:
        """The placement, or the one to return to."""
        return self.wanted or self.placement

    @property
    def experts_at(self) -> list[int]:
        """[experts], the expert at each place."""
        return placements.experts_at(self.placement, self.ranks)

    def by_place(self, columns: torch.Tensor) -> torch.Tensor:
        """[..., experts] -> [..., places]; differentiable."""
        if self.is_home:
            return columns
        if self._index is None:
            self._index = torch.tensor(self.experts_at, device=columns.device)
        return columns.index_select(-1, self._index)

    def chosen(self, loads: list[float], price: float) -> tuple[list[int], float, float]:
        """The placement for predicted loads, and the fullest rank over the mean before and after it."""
        before = self.intended
        after = placements.chosen(loads, before, self.ranks, price)
        mean = sum(loads) / self.ranks or 1.0
        now, then = (max(placements.rank_loads(loads, each, self.ranks)) / mean for each in (before, after))
        return after, now, then

    def move(self, after: list[int], state_of: StateOfSlot) -> int:
        """Exchange experts until the placement is `after`; returns the bytes that this rank sent. A collective."""
        sent = 0
        for each in placements.slot_moves(after, self.placement, self.ranks):
            with state_of(each.slot) as tensors:
                sent += exchange(tensors, each, self.group)
        self.placement, self.wanted, self._index = after, None, None
        return sent


__all__ = ["PlacedExperts", "StateOfSlot"]
