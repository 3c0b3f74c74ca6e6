"""One rank's queries against the keys of one rank after another: partial softmaxes in fp32, put together.

Outputs and gradients of blocks are summed in fp32 (float64 for float64) and rounded once. Each row's results are
weighted by their log-sum-exp; a row that has seen no key has the lse -inf and takes no part, and NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mindspeed_lite.ops import attention as op
from mindspeed_lite.ops.attention import PositionalDropout, packed
from mindspeed_lite.parallel.context.layout import Layout
from mindspeed_lite.parallel.context.pieces import Band, Piece, pieces


class Dropout(NamedTuple):
    """p: probability; seed: one number, drawn once a call; first_head, heads: whose heads these are."""

    p: float
    seed: torch.Tensor
    first_head: int
    heads: int


@dataclass(frozen=True)
class RankBlocks:
    """The products of one rank's queries and any rank's keys.

    layout: who holds which rows; rank: whose queries.
    band: the mask by position, causal order included.
    is_pack: whether tensors are [t, n, d], not [s, b, n, d].
    keys: the layout of the keys, where it is not that of the queries.
    """

    layout: Layout
    rank: int
    band: Band
    scale: float | None
    is_pack: bool
    dropout: Dropout | None = None
    keys: Layout | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, owner: int, partial: Partial) -> None:
        """Take the keys and values of `owner` into `partial`."""
        for piece in self._pieces(owner):
            if self.is_pack:
                spec = self._spec(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), piece)
                dropout = self._dropped(owner, q.device)
                out, lse = packed.forward(q, k, v, _packing(piece), spec, wide=True, dropout=dropout)
                rows = slice(piece.q[0][0], piece.q[-1][1])
                partial.merge(out[rows].unsqueeze(1), lse[:, rows].unsqueeze(0), rows)
                continue
            (rows, keys), *_ = _slices(piece)
            spec = self._spec(q[rows], k[keys], v[keys], piece)
            dropout = self._dropped(owner, q.device, rows, keys)
            partial.merge(*op.forward(q[rows], k[keys], v[keys], spec, wide=True, dropout=dropout), rows)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        owner: int,
        sums: Sums,
    ) -> None:
        """Add what the keys of `owner` contribute; lse: [b, n, s], or [n, t] of a pack."""
        for piece in self._pieces(owner):
            if self.is_pack:
                spec = self._spec(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), piece)
                dropout = self._dropped(owner, q.device)
                parts = packed.backward(dout, q, k, v, out, lse, _packing(piece), spec, wide=True, dropout=dropout)
                rows, keys = slice(None), slice(None)
            else:
                (rows, keys), *_ = _slices(piece)
                spec = self._spec(q[rows], k[keys], v[keys], piece)
                dropout = self._dropped(owner, q.device, rows, keys)
                its = dout[rows], q[rows], k[keys], v[keys], out[rows], lse[..., rows]
                parts = op.backward(*its, spec, wide=True, dropout=dropout)
            sums.dq[rows] += parts[0]
            sums.dk[keys] += parts[1]
            sums.dv[keys] += parts[2]

    def _pieces(self, owner: int) -> tuple[Piece, ...]:
        keys = self.layout if self.keys is None else self.keys
        return pieces(self.layout.shares[self.rank], keys.shares[owner], self.layout.documents, self.band)

    def _spec(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece) -> op.AttentionSpec:
        return op.prepare(q, k, v, window=piece.band, scale=self.scale)

    def _dropped(
        self, owner: int, device: torch.device, rows: slice = slice(None), keys: slice = slice(None)
    ) -> PositionalDropout | None:
        if self.dropout is None:
            return None
        places = self.layout if self.keys is None else self.keys
        p, seed, first_head, heads = self.dropout
        own, others = _positions(self.layout, self.rank, device), _positions(places, owner, device)
        return PositionalDropout(p, seed, own[rows], others[keys], first_head, heads)


@dataclass
class Partial:
    """out [s, b, n, dv] and lse [b, n, s] over the keys taken in so far; none at first."""

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(cls, q: torch.Tensor, v: torch.Tensor) -> Partial:
        """For q [s, b, n, d] and values of v's size."""
        s, b, n, _ = q.shape
        exact = _exact(q.dtype)
        return cls(q.new_zeros(s, b, n, v.shape[-1], dtype=exact), q.new_full((b, n, s), float("-inf"), dtype=exact))

    def merge(self, out: torch.Tensor, lse: torch.Tensor, rows: slice) -> None:
        """Take in the result over further keys for some rows."""
        before = self.lse[..., rows]
        both = torch.logaddexp(before, lse)
        # exp(-inf - -inf) would be NaN where neither has seen a key.
        level = both.masked_fill(both == float("-inf"), 0.0)
        here, there = ((each - level).exp_().permute(2, 0, 1).unsqueeze(-1) for each in (before, lse))
        self.out[rows].mul_(here).add_(out * there)
        before.copy_(both)


class Sums(NamedTuple):
    """Gradients in fp32 (float64 for float64), in the shapes of q, k and v."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def zero_sum(t: torch.Tensor) -> torch.Tensor:
    """Zeros of a tensor's shape in the dtype of sums."""
    return torch.zeros(t.shape, dtype=_exact(t.dtype), device=t.device)


def _packing(piece: Piece) -> packed.Packing:
    return packed.Packing(piece.q, piece.k)


def _slices(piece: Piece) -> list[tuple[slice, slice]]:
    return [(slice(*q), slice(*k)) for q, k in zip(piece.q, piece.k, strict=True)]


def _positions(layout: Layout, rank: int, device: torch.device) -> torch.Tensor:
    """[rows] int64, the stream's row of each row of a rank."""
    runs = [torch.arange(run.start, run.start + run.length, device=device) for run in layout.shares[rank]]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)
