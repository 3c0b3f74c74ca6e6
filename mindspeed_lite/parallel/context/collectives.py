"""Context parallelism by collectives: gathered keys and values, and Ulysses.

Gathered keys serve few key heads and any mask; the backward pass gathers again and reduce-scatters the gradients.
Ulysses exchanges a rank's rows with all heads for all rows with its heads: ranks get whole query-head groups with their
key heads. With fewer key heads than ranks, key heads are shared and their gradients summed. Nothing overlaps.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_lite.parallel.context.blocks import Partial, RankBlocks, Sums, sum_dtype, zero_sum
from mindspeed_lite.parallel.context.layout import Layout, Spans, by_rank, gathered, in_order
from mindspeed_lite.parallel.context.ring import KVMessage


@dataclass(frozen=True)
class GatheredKeys:
    group: ProcessGroup

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: RankBlocks, partial: Partial) -> dict[int, Tensor]:
        blocks, order = _over_all_keys(blocks)
        blocks.forward(q, *gather(k, v, self.group, order), 0, partial)
        return {}

    def backward(self, dout: Tensor, saved: tuple[Tensor, ...], kept: Mapping[int, Tensor], blocks: RankBlocks) -> Sums:
        q, k, v, out, lse = saved
        blocks, order = _over_all_keys(blocks)
        keys, values = gather(k, v, self.group, order)
        sums = Sums(zero_sum(q), zero_sum(keys), zero_sum(values))
        blocks.backward(dout, q, keys, values, out, lse, 0, sums)
        return Sums(sums.dq, *_scatter(sums.dk, sums.dv, KVMessage.of(k, v), self.group, order))


def _over_all_keys(blocks: RankBlocks) -> tuple[RankBlocks, Spans]:
    whole = gathered(blocks.layout, blocks.layout.ranks)
    return dataclasses.replace(blocks, keys=whole.layout), whole.order[0]


def gather(k: Tensor, v: Tensor, group: ProcessGroup, order: Spans) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks, in `order` (see `layout.Gathered`)."""
    pair = KVMessage.of(k, v)
    own = pair.pack(k, v)
    everything = own.new_empty(group.size() * own.numel())
    dist.all_gather_into_tensor(everything, own, group=group)
    parts = [pair.unpack(each) for each in everything.chunk(group.size())]
    return in_order([keys for keys, _ in parts], order), in_order([values for _, values in parts], order)


def _scatter(dk: Tensor, dv: Tensor, pair: KVMessage, group: ProcessGroup, order: Spans) -> tuple[Tensor, Tensor]:
    ranks = group.size()
    messages = [pair.pack(*parts) for parts in zip(by_rank(dk, order, ranks), by_rank(dv, order, ranks), strict=True)]
    own = torch.empty_like(messages[0])
    dist.reduce_scatter_tensor(own, torch.cat(messages), group=group)
    return pair.unpack(own)


def gather_keys(k: Tensor, v: Tensor, layout: Layout, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence in order, differentiable."""
    order, pair = gathered(layout, layout.ranks).order[0], KVMessage.of(k, v)

    def adjoint(dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        exact = sum_dtype(dk.dtype)
        keys, values = _scatter(dk.to(exact), dv.to(exact), pair, group, order)
        return keys.to(dk.dtype), values.to(dv.dtype)

    keys, values = _LinearMap.apply(lambda k, v: gather(k, v, group, order), adjoint, k, v)  # type: ignore[no-untyped-call]
    return keys, values


class _LinearMap(torch.autograd.Function):
    """Linear map of several tensors, whose backward applies the adjoint; saves no tensor."""

    @staticmethod
    def forward(ctx: Any, forward: Any, adjoint: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.adjoint = adjoint
        return tuple(forward(*tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.adjoint(*gradients)


class HeadSplit(NamedTuple):
    """Query heads and key heads of each rank, as (first, end)."""

    q: Spans
    k: Spans


@functools.lru_cache(maxsize=64)
def split_heads(heads: int, groups: int, ranks: int) -> HeadSplit:
    """Split heads evenly. Raises ValueError if a rank gets no query head or no key head."""
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
    size, more = divmod(items, parts)
    ends = [size * i + min(i, more) for i in range(parts + 1)]
    return tuple(itertools.pairwise(ends))


def to_heads(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, order: Spans, *, gather_keys: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, .., heads, size] -> [all rows, .., its heads, size], differentiable.

    order: of the ranks' concatenated rows (see `layout.Gathered`).
    gather_keys: gather all key heads instead.
    """
    split = split_heads(q.shape[-2], k.shape[-2], group.size())
    heads = split.q, split.k, split.k

    def forward(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        if not gather_keys:
            return _scatter_heads((q, k, v), heads, group, order)
        first, end = split.k[group.rank()]
        gathered_heads = (t[..., first:end, :] for t in gather(k, v, group, order))
        return [*_scatter_heads((q,), (split.q,), group, order), *gathered_heads]

    def adjoint(*gradients: Tensor) -> list[Tensor]:
        return _gather_heads(gradients, heads, group, order)

    queries, keys, values = _LinearMap.apply(forward, adjoint, q, k, v)  # type: ignore[no-untyped-call]
    return queries, keys, values


def to_rows(out: Tensor, group: ProcessGroup, order: Spans, heads: Spans) -> Tensor:
    """[all rows, .., own heads, size] -> [rows, .., all heads, size], differentiable."""
    (rows,) = _LinearMap.apply(  # type: ignore[no-untyped-call]
        lambda t: _gather_heads((t,), (heads,), group, order),
        lambda t: _scatter_heads((t,), (heads,), group, order),
        out,
    )
    return rows  # type: ignore[no-any-return]


def _scatter_heads(
    tensors: Sequence[Tensor], heads: Sequence[Spans], group: ProcessGroup, order: Spans
) -> list[Tensor]:
    rank = group.rank()
    outgoing = [
        torch.cat([t[..., slice(*its[peer]), :].reshape(-1) for t, its in zip(tensors, heads, strict=True)])
        for peer in range(group.size())
    ]
    shapes = [(*t.shape[:-2], its[rank][1] - its[rank][0], t.shape[-1]) for t, its in zip(tensors, heads, strict=True)]
    return [in_order(parts, order) for parts in _all_to_all(outgoing, [shapes] * group.size(), group)]


def _gather_heads(tensors: Sequence[Tensor], heads: Sequence[Spans], group: ProcessGroup, order: Spans) -> list[Tensor]:
    """Inverse; shared heads are summed."""
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
    received = _all_to_all(outgoing, shapes, group)
    return [_join_heads(parts, its) for parts, its in zip(received, heads, strict=True)]


def _join_heads(parts: Sequence[Tensor], heads: Spans) -> Tensor:
    """Sums are fp32 (float64 for float64) and rounded once."""
    if len(set(heads)) == len(heads):
        return torch.cat(list(parts), -2)
    first = parts[0]
    shape = *first.shape[:-2], max(end for _, end in heads), first.shape[-1]
    total = first.new_zeros(shape, dtype=sum_dtype(first.dtype))
    for part, (start, end) in zip(parts, heads, strict=True):
        total[..., start:end, :] += part
    return total.to(first.dtype)


def _all_to_all(
    outgoing: Sequence[Tensor], shapes: Sequence[Sequence[tuple[int, ...]]], group: ProcessGroup
) -> list[list[Tensor]]:
    sizes = [[math.prod(shape) for shape in its] for its in shapes]
    received = outgoing[0].new_empty(sum(map(sum, sizes)))
    sent = [each.numel() for each in outgoing]
    dist.all_to_all_single(received, torch.cat(list(outgoing)), [sum(its) for its in sizes], sent, group=group)
    parts = iter(torch.split_with_sizes(received, list(itertools.chain(*sizes))))
    by_peer = [[next(parts).view(shape) for shape in its] for its in shapes]
    return [list(each) for each in zip(*by_peer, strict=True)]
