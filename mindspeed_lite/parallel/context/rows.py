"""Rows of several ranks behind one another, in the order of the sequence, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mindspeed_lite.parallel.context.layout import Spans
from mindspeed_lite.parallel.context.messages import Pair


def in_order(parts: Sequence[torch.Tensor], order: Spans) -> torch.Tensor:
    """The rows of tensors behind one another, in `order` (see `layout.Gathered`); no span crosses two tensors."""
    rows = parts[0].shape[0]
    return torch.cat([parts[first // rows][first % rows : first % rows + length] for first, length in order])


def by_rank(t: torch.Tensor, order: Spans, ranks: int) -> list[torch.Tensor]:
    """The inverse of `in_order`."""
    spans, row = {}, 0
    for first, length in order:
        spans[first] = t[row : row + length]
        row += length
    return list(torch.cat([spans[first] for first in sorted(spans)]).chunk(ranks))


def gather(
    k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, order: Spans
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all ranks, in `order`; one collective."""
    pair = Pair.of(k, v)
    own = pair.message(k, v)
    everything = own.new_empty(group.size() * own.numel())
    dist.all_gather_into_tensor(everything, own, group=group)
    parts = [pair.of_message(each) for each in everything.chunk(group.size())]
    return in_order([keys for keys, _ in parts], order), in_order([values for _, values in parts], order)
