"""Reorders row chunks: block copies if the host knows their sizes, else an index lookup."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_lite.ops import traced
from mindspeed_lite.ops.autograd import Map, linear_map

Numbers = Tensor | Sequence[int]


def sort_chunks(
    x: Tensor, split_sizes: Numbers, order: Numbers, probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(sorted, sorted_probs): chunks of `split_sizes` rows of x and probs, joined in `order`.

    x, probs: [P, ...]; split_sizes: [C] with sum P; order: permutation [C]; tensors or sequences. Device sizes are not
    read back. Differentiable in x and probs. Raises ValueError for arguments known to the host.
    """
    if probs is not None and probs.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"sort_chunks: want x [P, ...] and probs [P, ...], not {tuple(x.shape)} and {tuple(probs.shape)}"
        )
    maps = _maps(x.shape[0], split_sizes, order)
    if maps is None:
        return x, probs
    return linear_map(x, *maps), None if probs is None else linear_map(probs, *maps)


def _maps(rows: int, split_sizes: Numbers, order: Numbers) -> tuple[Map, Map] | None:
    """The reordering and its inverse, or None for the identity."""
    given = (split_sizes, order)
    on_device = [each for each in given if isinstance(each, Tensor) and each.device.type != "cpu"]
    if on_device:
        sizes, places = (torch.as_tensor(each, device=on_device[0].device).reshape(-1).long() for each in given)
        if sizes.shape != places.shape:
            raise ValueError(f"sort_chunks: {sizes.numel()} sizes and an order of {places.numel()}")
        return functools.partial(_look_up, sizes, places), lambda y: _look_up(sizes[places], places.argsort(), y)
    counts, chunks = (each.flatten().tolist() if isinstance(each, Tensor) else list(each) for each in given)
    if sorted(chunks) != list(range(len(counts))):
        raise ValueError(f"sort_chunks: {chunks} is no order of {len(counts)} chunks")
    if sum(counts) != rows or min(counts, default=0) < 0:
        raise ValueError(f"sort_chunks: chunks of {counts} rows do not make {rows}")
    if chunks == sorted(chunks):
        return None
    inverse, moved = sorted(range(len(chunks)), key=chunks.__getitem__), [counts[each] for each in chunks]
    return functools.partial(_join, counts, chunks), functools.partial(_join, moved, inverse)


def _join(sizes: list[int], order: list[int], x: Tensor) -> Tensor:
    if traced.dry:
        return torch.empty_like(x)
    pieces = torch.split_with_sizes(x, sizes)
    return torch.cat([pieces[chunk] for chunk in order])


def _look_up(sizes: Tensor, order: Tensor, x: Tensor) -> Tensor:
    start = sizes.cumsum(0) - sizes  # [C]
    end = sizes[order].cumsum(0)  # [C], of the result
    row = torch.arange(x.shape[0], device=sizes.device)
    place = torch.searchsorted(end, row, right=True).clamp_(max=sizes.shape[0] - 1)
    shift = start[order] - (end - sizes[order])
    return x.index_select(0, row + shift[place])
