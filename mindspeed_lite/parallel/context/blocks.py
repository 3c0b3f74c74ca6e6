"""Attention of one rank's queries over one rank's keys at a time.

Sums are fp32 (float64 for float64) and rounded once. Rows are weighted by their log-sum-exp; rows without keys have lse
-inf and are skipped, NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops import attention as op
from mindspeed_lite.ops.attention import PositionalDropout, packed
from mindspeed_lite.ops.attention.autograd import sink_gradient, with_sink
from mindspeed_lite.parallel.context.layout import Band, Layout, Piece, pieces


class Dropout(NamedTuple):
    """Probability, seed of the call, this rank's first head, and total heads."""

    p: float
    seed: Tensor
    first_head: int
    heads: int


class Sums(NamedTuple):
    """Accumulators of dq, dk and dv, in fp32 or wider."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def zero_sum(t: Tensor) -> Tensor:
    return torch.zeros(t.shape, dtype=sum_dtype(t.dtype), device=t.device)


@dataclass
class Partial:
    """out [s, b, n, dv] and lse [b, n, s] over merged keys."""

    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, q: Tensor, v: Tensor) -> Partial:
        s, b, n, _ = q.shape
        dtype = sum_dtype(q.dtype)
        return cls(q.new_zeros(s, b, n, v.shape[-1], dtype=dtype), q.new_full((b, n, s), float("-inf"), dtype=dtype))

    def merge(self, out: Tensor, lse: Tensor, rows: slice) -> None:
        """Merge the result of some rows over further keys."""
        before = self.lse[..., rows]
        both = torch.logaddexp(before, lse)
        # Avoids exp(-inf - -inf) = NaN where neither has seen a key.
        level = both.masked_fill(both == float("-inf"), 0.0)
        here, there = ((each - level).exp_().permute(2, 0, 1).unsqueeze(-1) for each in (before, lse))
        self.out[rows].mul_(here).add_(out * there)
        before.copy_(both)


@dataclass(frozen=True)
class RankBlocks:
    """Attention blocks of one rank's queries and any rank's keys.

    layout, rank: rows of all ranks, and the queries' rank.
    band: positional mask, including causality.
    is_pack: tensors are [t, 1, n, d].
    keys: layout of the keys if different.
    """

    layout: Layout
    rank: int
    band: Band
    scale: float | None
    is_pack: bool
    dropout: Dropout | None = None
    keys: Layout | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, owner: int, partial: Partial) -> None:
        """Merge the block with `owner`'s keys."""
        for piece in self._pieces(owner):
            if self.is_pack:
                spec, packing = self._spec(q, k, v, piece.band), packed.Packing(piece.q, piece.k)
                dropout = self._dropped(owner, q.device)
                out, lse = packed.forward(
                    q.squeeze(1), k.squeeze(1), v.squeeze(1), packing, spec, wide=True, dropout=dropout
                )
                rows = slice(piece.q[0][0], piece.q[-1][1])
                partial.merge(out[rows].unsqueeze(1), lse[:, rows].unsqueeze(0), rows)
            else:
                rows, keys = slice(*piece.q[0]), slice(*piece.k[0])
                spec = self._spec(q[rows], k[keys], v[keys], piece.band)
                dropout = self._dropped(owner, q.device, rows, keys)
                partial.merge(*op.forward(q[rows], k[keys], v[keys], spec, wide=True, dropout=dropout), rows)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, owner: int, sums: Sums
    ) -> None:
        """Add the gradients of the block with the keys of rank `owner` to `sums`; lse is [b, n, s]."""
        for piece in self._pieces(owner):
            if self.is_pack:
                spec, packing = self._spec(q, k, v, piece.band), packed.Packing(piece.q, piece.k)
                dout_, q_, k_, v_, out_ = (t.squeeze(1) for t in (dout, q, k, v, out))
                dropout = self._dropped(owner, q.device)
                parts = packed.backward(
                    dout_, q_, k_, v_, out_, lse.squeeze(0), packing, spec, wide=True, dropout=dropout
                )
                for total, part in zip(sums, parts, strict=False):
                    total += part.unsqueeze(1)
            else:
                rows, keys = slice(*piece.q[0]), slice(*piece.k[0])
                spec = self._spec(q[rows], k[keys], v[keys], piece.band)
                dropout = self._dropped(owner, q.device, rows, keys)
                parts = op.backward(
                    dout[rows], q[rows], k[keys], v[keys], out[rows], lse[..., rows], spec, wide=True, dropout=dropout
                )
                sums.dq[rows] += parts[0]
                sums.dk[keys] += parts[1]
                sums.dv[keys] += parts[2]

    def _pieces(self, owner: int) -> tuple[Piece, ...]:
        keys = (self.keys or self.layout).shares[owner]
        return pieces(self.layout.shares[self.rank], keys, self.layout.documents, self.band)

    def _spec(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> op.AttentionSpec:
        return op.prepare(q, k, v, window=band, scale=self.scale)

    def _dropped(
        self, owner: int, device: torch.device, rows: slice = slice(None), keys: slice = slice(None)
    ) -> PositionalDropout | None:
        if self.dropout is None:
            return None
        p, seed, first_head, heads = self.dropout
        own, others = _positions(self.layout, self.rank, device), _positions(self.keys or self.layout, owner, device)
        return PositionalDropout(p, seed, own[rows], others[keys], first_head, heads)


def _positions(layout: Layout, rank: int, device: torch.device) -> Tensor:
    runs = [torch.arange(run.start, run.start + run.length, device=device) for run in layout.shares[rank]]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)


def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, blocks: RankBlocks, exchange: Any) -> Tensor:
    """q [s, b, n, d], k [s, b, g, d], v [s, b, g, dv], sink [n] -> [s, b, n, dv].

    exchange: `forward` merges every owner's block and returns tensors to save, by owner; `backward` returns the
    gradients summed over all ranks.
    """
    out: Tensor = _Attention.apply(q, k, v, sink, blocks, exchange)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, blocks: RankBlocks, exchange: Any
    ) -> Tensor:
        partial = Partial.of(q, v)
        kept = exchange.forward(q, k, v, blocks, partial)
        out, lse = partial.out, partial.lse
        if sink is not None:
            out, lse = with_sink(out, lse, sink)
        out = out.to(q.dtype)
        ctx.save_for_backward(sink, q, k, v, out, lse, *kept.values())
        ctx.kept, ctx.blocks, ctx.exchange = tuple(kept), blocks, exchange
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        sink, q, k, v, out, lse, *kept = ctx.saved_tensors
        kept = dict(zip(ctx.kept, kept, strict=True))
        dq, dk, dv = ctx.exchange.backward(dout, (q, k, v, out, lse), kept, ctx.blocks)
        dsink = sink_gradient(dout, out, lse, sink) if ctx.needs_input_grad[3] else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None, None
