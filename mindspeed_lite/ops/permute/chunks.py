"""Reorders row chunks: block copies if the host knows their sizes, else an index lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mindspeed_lite.ops.autograd import linear_map


class Blocks(NamedTuple):
    sizes: list[int]
    order: list[int]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        pieces = torch.split_with_sizes(x, self.sizes)
        return torch.cat([pieces[chunk] for chunk in self.order]) if pieces else x.clone()

    def undo(self, y: torch.Tensor) -> torch.Tensor:
        return Blocks([self.sizes[chunk] for chunk in self.order], _inverse(self.order)).apply(y)


class Lookup(NamedTuple):
    sizes: torch.Tensor
    order: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, self._rows(self.sizes, self.order, x.shape[0]))

    def undo(self, y: torch.Tensor) -> torch.Tensor:
        return y.index_select(0, self._rows(self.sizes[self.order], self.order.argsort(), y.shape[0]))

    @staticmethod
    def _rows(sizes: torch.Tensor, order: torch.Tensor, count: int) -> torch.Tensor:
        """Source row of each output row."""
        sizes = sizes.long()
        start = sizes.cumsum(0) - sizes  # [C]
        end = sizes[order].cumsum(0)  # [C], of the result
        row = torch.arange(count, device=sizes.device)
        place = torch.searchsorted(end, row, right=True).clamp_(max=sizes.shape[0] - 1)
        shift = start[order] - (end - sizes[order])
        return row + shift[place]


def plan(x: torch.Tensor, split_sizes: torch.Tensor | Sequence[int], order: torch.Tensor | Sequence[int]) -> Any:
    if _on_device(split_sizes) or _on_device(order):
        device = split_sizes.device if _on_device(split_sizes) else order.device  # type: ignore[union-attr]
        sizes, places = (torch.as_tensor(each, device=device).reshape(-1) for each in (split_sizes, order))
        if sizes.shape != places.shape:
            raise ValueError(f"sort_chunks: {sizes.numel()} sizes and an order of {places.numel()}")
        return Lookup(sizes, places.long())
    blocks = Blocks(_listed(split_sizes), _listed(order))
    if sorted(blocks.order) != list(range(len(blocks.sizes))):
        raise ValueError(f"sort_chunks: {blocks.order} is no order of {len(blocks.sizes)} chunks")
    if sum(blocks.sizes) != x.shape[0] or min(blocks.sizes, default=0) < 0:
        raise ValueError(f"sort_chunks: chunks of {blocks.sizes} rows do not make {x.shape[0]}")
    return blocks


def sort(x: torch.Tensor, by: Blocks | Lookup) -> torch.Tensor:
    if isinstance(by, Blocks) and by.order == list(range(len(by.order))):
        return x
    return linear_map(x, by.apply, by.undo)


def _inverse(order: list[int]) -> list[int]:
    places = [0] * len(order)
    for place, chunk in enumerate(order):
        places[chunk] = place
    return places


def _on_device(values: torch.Tensor | Sequence[int]) -> bool:
    return isinstance(values, torch.Tensor) and values.device.type != "cpu"


def _listed(values: torch.Tensor | Sequence[int]) -> list[int]:
    return values.flatten().tolist() if isinstance(values, torch.Tensor) else list(values)
