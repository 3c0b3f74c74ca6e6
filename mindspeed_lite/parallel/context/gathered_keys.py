"""Attention over all-gathered keys and values: for few key heads, and for any mask.

The backward pass gathers again and reduce-scatters the gradients. Nothing overlaps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from mindspeed_lite.parallel.context.blocks import Partial, RankBlocks, Sums, sum_dtype, zero_sum
from mindspeed_lite.parallel.context.layout import Layout, Spans, by_rank, gathered, in_order
from mindspeed_lite.parallel.context.ring import KVMessage


@dataclass(frozen=True)
class GatheredKeys:
    group: dist.ProcessGroup

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: RankBlocks, partial: Partial
    ) -> dict[int, torch.Tensor]:
        blocks, order = _over_all_keys(blocks)
        blocks.forward(q, *gather(k, v, self.group, order), 0, partial)
        return {}

    def backward(
        self,
        dout: torch.Tensor,
        saved: tuple[torch.Tensor, ...],
        kept: Mapping[int, torch.Tensor],
        blocks: RankBlocks,
    ) -> Sums:
        q, k, v, out, lse = saved
        blocks, order = _over_all_keys(blocks)
        keys, values = gather(k, v, self.group, order)
        sums = Sums(zero_sum(q), zero_sum(keys), zero_sum(values))
        blocks.backward(dout, q, keys, values, out, lse, 0, sums)
        return Sums(sums.dq, *_scatter(sums.dk, sums.dv, KVMessage.of(k, v), self.group, order))


def _over_all_keys(blocks: RankBlocks) -> tuple[RankBlocks, Spans]:
    whole = gathered(blocks.layout, blocks.layout.ranks)
    return dataclasses.replace(blocks, keys=whole.layout), whole.order[0]


def gather(
    k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, order: Spans
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all ranks, in `order` (see `layout.Gathered`)."""
    pair = KVMessage.of(k, v)
    own = pair.pack(k, v)
    everything = own.new_empty(group.size() * own.numel())
    dist.all_gather_into_tensor(everything, own, group=group)
    parts = [pair.unpack(each) for each in everything.chunk(group.size())]
    return in_order([keys for keys, _ in parts], order), in_order([values for _, values in parts], order)


def _scatter(
    dk: torch.Tensor, dv: torch.Tensor, pair: KVMessage, group: dist.ProcessGroup, order: Spans
) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = group.size()
    messages = [pair.pack(*parts) for parts in zip(by_rank(dk, order, ranks), by_rank(dv, order, ranks), strict=True)]
    own = torch.empty_like(messages[0])
    dist.reduce_scatter_tensor(own, torch.cat(messages), group=group)
    return pair.unpack(own)


def gather_keys(
    k: torch.Tensor, v: torch.Tensor, layout: Layout, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the whole sequence in order, differentiable."""
    order = gathered(layout, layout.ranks).order[0]
    pair: tuple[torch.Tensor, torch.Tensor] = _Keys.apply(k, v, group, order)  # type: ignore[no-untyped-call]
    return pair


class _Keys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, order: Spans
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.pair, ctx.group, ctx.order = KVMessage.of(k, v), group, order
        return gather(k, v, group, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exact = sum_dtype(dk.dtype)
        keys, values = _scatter(dk.to(exact), dv.to(exact), ctx.pair, ctx.group, ctx.order)
        return keys.to(dk.dtype), values.to(dv.dtype), None, None
