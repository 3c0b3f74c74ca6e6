"""Ulysses: all-to-alls turn a part of the sequence with all heads into the whole sequence with a part of the heads.

Each rank gets whole groups of query heads with their key heads. With fewer key heads than ranks, several ranks get the
same key head, and its gradients are summed. Heads that do not divide evenly are spread as evenly as they go. The rows
of the ranks are put into the order of the sequence on the way, so that a zigzag stays Megatron's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from mindspeed_lite.parallel.context.layout import Spans
from mindspeed_lite.parallel.context.rows import by_rank, gather, in_order


class HeadSplit(NamedTuple):
    """q, k: for each rank its query heads and its key heads, as (first, end)."""

    q: Spans
    k: Spans


@functools.lru_cache(maxsize=64)
def split_heads(heads: int, groups: int, ranks: int) -> HeadSplit:
    """Who computes which heads.

    Raises:
        ValueError: there are fewer query heads than ranks, or so few for a key head that a rank would have none.
    """
    ratio = heads // groups
    if groups >= ranks:
        keys = _evenly(groups, ranks)
        return HeadSplit(tuple((first * ratio, end * ratio) for first, end in keys), keys)
    queries, owners = [], []
    for group, (first, end) in enumerate(_evenly(ranks, groups)):
        if end - first > ratio:
            raise ValueError(
                f"Ulysses over {ranks} ranks: {heads} query heads in {groups} groups of {ratio} are fewer than the "
                "ranks that share them; use fewer ranks, or a ring over the rest"
            )
        queries += [(group * ratio + a, group * ratio + b) for a, b in _evenly(ratio, end - first)]
        owners += [(group, group + 1)] * (end - first)
    return HeadSplit(tuple(queries), tuple(owners))


def _evenly(items: int, parts: int) -> Spans:
    """Spans of nearly one size; the first ones are the larger ones."""
    size, more = divmod(items, parts)
    ends = [size * i + min(i, more) for i in range(parts + 1)]
    return tuple(itertools.pairwise(ends))


def to_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup,
    order: Spans,
    *,
    gather_keys: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[rows, .., heads, size] of this rank -> [all rows, .., its heads, size], differentiable.

    order: that of the rows behind one another (see `layout.Gathered`).
    gather_keys: gather all key heads and take what is needed, instead of sending each rank its own.
    """
    split = split_heads(q.shape[-2], k.shape[-2], group.size())
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    result = _ToHeads.apply(q, k, v, group, order, split, gather_keys)  # type: ignore[no-untyped-call]
    return result


def to_rows(out: torch.Tensor, group: dist.ProcessGroup, order: Spans, heads: Spans) -> torch.Tensor:
    """[all rows, .., own heads, size] -> [rows, .., all heads, size], differentiable."""
    result: torch.Tensor = _ToRows.apply(out, group, order, heads)  # type: ignore[no-untyped-call]
    return result


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: dist.ProcessGroup,
        order: Spans,
        split: HeadSplit,
        gather_keys: bool,
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.order, ctx.split = group, order, split
        if not gather_keys:
            return tuple(_scatter_heads((q, k, v), (split.q, split.k, split.k), group, order))
        (queries,) = _scatter_heads((q,), (split.q,), group, order)
        first, end = split.k[group.rank()]
        keys, values = (t[..., first:end, :] for t in gather(k, v, group, order))
        return queries, keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        split: HeadSplit = ctx.split
        return (*_gather_heads(gradients, (split.q, split.k, split.k), ctx.group, ctx.order), None, None, None, None)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, group: dist.ProcessGroup, order: Spans, heads: Spans) -> torch.Tensor:
        ctx.group, ctx.order, ctx.heads = group, order, heads
        return _gather_heads((out,), (heads,), group, order)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _scatter_heads((dout,), (ctx.heads,), ctx.group, ctx.order)[0], None, None, None


def _scatter_heads(
    tensors: Sequence[torch.Tensor], heads: Sequence[Spans], group: dist.ProcessGroup, order: Spans
) -> list[torch.Tensor]:
    """Each rank its heads of these tensors, of the rows of all ranks; one all-to-all for all tensors."""
    rank, ranks = group.rank(), group.size()
    outgoing = [
        torch.cat([t[..., slice(*its[peer]), :].reshape(-1) for t, its in zip(tensors, heads, strict=True)])
        for peer in range(ranks)
    ]
    shapes = [(*t.shape[:-2], its[rank][1] - its[rank][0], t.shape[-1]) for t, its in zip(tensors, heads, strict=True)]
    size = sum(_numel(shape) for shape in shapes)
    incoming = _exchange(outgoing, [size] * ranks, group)
    parts = [_cut(message, shapes) for message in incoming]
    return [in_order([part[number] for part in parts], order) for number in range(len(tensors))]


def _gather_heads(
    tensors: Sequence[torch.Tensor], heads: Sequence[Spans], group: dist.ProcessGroup, order: Spans
) -> list[torch.Tensor]:
    """The inverse: the own rows of these tensors with all heads; what several ranks have of one head is summed."""
    rank, ranks = group.rank(), group.size()
    rows = [by_rank(t, order, ranks) for t in tensors]
    outgoing = [torch.cat([parts[peer].reshape(-1) for parts in rows]) for peer in range(ranks)]
    shapes = [
        [
            (parts[rank].shape[0], *t.shape[1:-2], its[peer][1] - its[peer][0], t.shape[-1])
            for t, parts, its in zip(tensors, rows, heads, strict=True)
        ]
        for peer in range(ranks)
    ]
    incoming = _exchange(outgoing, [sum(_numel(shape) for shape in its) for its in shapes], group)
    parts = [_cut(message, its) for message, its in zip(incoming, shapes, strict=True)]
    return [_joined([part[number] for part in parts], its) for number, its in enumerate(heads)]


def _joined(parts: Sequence[torch.Tensor], heads: Spans) -> torch.Tensor:
    """Heads of all ranks as one tensor; sums are fp32 (float64 for float64) and rounded once."""
    if len(set(heads)) == len(heads):
        return torch.cat(list(parts), -2)
    first = parts[0]
    exact = torch.float64 if first.dtype == torch.float64 else torch.float32
    whole = first.new_zeros(*first.shape[:-2], max(end for _, end in heads), first.shape[-1], dtype=exact)
    for part, (start, end) in zip(parts, heads, strict=True):
        whole[..., start:end, :] += part
    return whole.to(first.dtype)


def _exchange(outgoing: Sequence[torch.Tensor], sizes: list[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Flat messages to every rank, and those of every rank, of these sizes."""
    received = outgoing[0].new_empty(sum(sizes))
    sent = [each.numel() for each in outgoing]
    dist.all_to_all_single(received, torch.cat(list(outgoing)), sizes, sent, group=group)
    return list(torch.split_with_sizes(received, sizes))


def _cut(message: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    pieces = torch.split_with_sizes(message, [_numel(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
