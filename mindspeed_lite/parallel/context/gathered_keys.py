"""Attention with gathered keys and values: one collective instead of a ring, for few key heads.

Every rank gathers the whole sequence's keys and values, and computes its own queries. Only the own keys and values are
kept: the backward pass gathers again, and scatters the sums of their gradients. Nothing of it overlaps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops.attention.autograd import sink_gradient
from mindspeed_lite.parallel.context.layout import Layout, Spans, gathered
from mindspeed_lite.parallel.context.messages import Pair
from mindspeed_lite.parallel.context.partial import Partial, RankBlocks, Sums, zero_sum
from mindspeed_lite.parallel.context.ring import finish
from mindspeed_lite.parallel.context.rows import by_rank, gather


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    blocks: RankBlocks,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """As `ring.attend`."""
    whole = gathered(blocks.layout, blocks.layout.ranks)
    blocks = dataclasses.replace(blocks, keys=whole.layout)
    out: torch.Tensor = _Gathered.apply(q, k, v, sink, blocks, group, whole.order[0])  # type: ignore[no-untyped-call]
    return out


def gather_keys(
    k: torch.Tensor, v: torch.Tensor, layout: Layout, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole sequence's keys and values in its order, differentiable."""
    order = gathered(layout, layout.ranks).order[0]
    pair: tuple[torch.Tensor, torch.Tensor] = _Keys.apply(k, v, group, order)  # type: ignore[no-untyped-call]
    return pair


class _Keys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, order: Spans
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.pair, ctx.group, ctx.order = Pair.of(k, v), group, order
        return gather(k, v, group, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exact = torch.float64 if dk.dtype == torch.float64 else torch.float32
        keys, values = _scatter(dk.to(exact), dv.to(exact), ctx.pair, ctx.group, ctx.order)
        return keys.to(dk.dtype), values.to(dv.dtype), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        blocks: RankBlocks,
        group: dist.ProcessGroup,
        order: Spans,
    ) -> torch.Tensor:
        partial = Partial.of(q if q.dim() == 4 else q.unsqueeze(1), v)
        blocks.forward(q, *gather(k, v, group, order), 0, partial)
        out, lse = finish(partial, sink, q.dtype)
        if blocks.is_pack:
            out, lse = out.squeeze(1), lse.squeeze(0)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.blocks, ctx.group, ctx.order = blocks, group, order
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        blocks: RankBlocks = ctx.blocks
        keys, values = gather(k, v, ctx.group, ctx.order)
        sums = Sums(zero_sum(q), zero_sum(keys), zero_sum(values))
        blocks.backward(dout, q, keys, values, out, lse, 0, sums)
        dk, dv = _scatter(sums.dk, sums.dv, Pair.of(k, v), ctx.group, ctx.order)
        dsink = None
        if ctx.needs_input_grad[3]:
            rows = (dout, out, lse) if not blocks.is_pack else (dout.unsqueeze(1), out.unsqueeze(1), lse.unsqueeze(0))
            dsink = sink_gradient(*rows, sink)
        return sums.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None, None, None


def _scatter(
    dk: torch.Tensor, dv: torch.Tensor, pair: Pair, group: dist.ProcessGroup, order: Spans
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse: each rank's rows of the sums over all ranks."""
    ranks = group.size()
    messages = [
        pair.message(*parts) for parts in zip(by_rank(dk, order, ranks), by_rank(dv, order, ranks), strict=True)
    ]
    own = torch.empty_like(messages[0])
    dist.reduce_scatter_tensor(own, torch.cat(messages), group=group)
    return pair.of_message(own)
