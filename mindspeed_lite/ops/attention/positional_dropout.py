"""Dropout of attention drawn by position: a weight is dropped or kept whatever rank, block or order computes it.

A weight's fate is a hash of the seed, its batch, its head and the positions of its query and its key, so that a part
of the scores needs no state and no generator. Plain PyTorch, a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from mindspeed_lite.ops.attention import band
from mindspeed_lite.ops.attention.autograd import Pair, Triple

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention.spec import AttentionSpec

# Scores of one block of rows, over all batches and heads.
_SCORES = 1 << 20

# Odd numbers of 64 bits: of the splitmix64 generator, and the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_DRAWS = 1 << 24


class PositionalDropout(NamedTuple):
    """Which weights a call drops.

    p: probability, a multiple of 2^-24 after rounding; what is kept is scaled by the rounded one.
    seed: one int64 number on the device, the same for all parts of one attention.
    rows, keys: [sq] and [sk] int64, the positions of this call's queries and keys in the whole attention.
    first_head, heads: which of how many heads the call's first one is.
    """

    p: float
    seed: torch.Tensor
    rows: torch.Tensor
    keys: torch.Tensor
    first_head: int
    heads: int

    def of_rows(self, rows: slice, keys: slice = slice(None)) -> PositionalDropout:
        """The same for some of the queries and keys."""
        return self._replace(rows=self.rows[rows], keys=self.keys[keys])

    def scale_of(self, batches: int, heads: int) -> torch.Tensor:
        """[batches, heads, sq, sk] fp32: 1 / (probability of being kept) where a weight is kept, else 0."""
        device = self.rows.device
        dropped = min(max(round(self.p * _DRAWS), 1), _DRAWS - 1)
        head = torch.arange(heads, device=device) + self.first_head
        pair = torch.arange(batches, device=device).unsqueeze(1) * self.heads + head
        x = _mixed(_mixed(pair * _GOLDEN + self.seed).unsqueeze(-1) + self.rows)
        x = _mixed(x.unsqueeze(-1) + self.keys * _GOLDEN)
        return ((x & (_DRAWS - 1)) >= dropped).float().mul_(_DRAWS / (_DRAWS - dropped))


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64; shifts keep the sign here, which mixes no worse."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, dropout: PositionalDropout) -> Pair:
    """As the package's `forward`, with fp32 results (float64 for float64); lse is that without dropout."""
    (sq, b, n, _), (sk, _, g, dv) = q.shape, v.shape
    queries, keys, values = _heads_first(q, g), _heads_first(k, g), _heads_first(v, g)
    out = queries.new_zeros(b, n, sq, dv)
    lse = queries.new_full((b, n, sq), float("-inf"))
    for rows in _rows(b * n, sq, sk):
        scores = _scores(queries, keys, spec, rows, sk)
        its = scores.logsumexp(-1)
        lse[..., rows] = its.flatten(1, 2)
        weights = _weights(scores, its) * dropout.of_rows(rows).scale_of(b, n).view(b, g, n // g, -1, sk)
        out[..., rows, :] = (weights @ values).flatten(1, 2)
    return out.permute(2, 0, 1, 3).contiguous(), lse


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: AttentionSpec,
    dropout: PositionalDropout,
) -> Triple:
    """As the package's `backward`, with fp32 results (float64 for float64)."""
    (sq, b, n, _), (sk, _, g, _) = q.shape, v.shape
    queries, keys, values, douts = (_heads_first(t, g) for t in (q, k, v, dout))
    delta = (douts * _heads_first(out, g)).sum(-1, keepdim=True)
    lse = lse.to(queries.dtype).reshape(b, g, n // g, sq)
    dq, dk, dv = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for rows in _rows(b * n, sq, sk):
        weights = _weights(_scores(queries, keys, spec, rows, sk), lse[..., rows])
        kept = dropout.of_rows(rows).scale_of(b, n).view(b, g, n // g, -1, sk)
        grad = douts[..., rows, :]
        dv += ((weights * kept).transpose(-1, -2) @ grad).sum(2, keepdim=True)
        dscores = (grad @ values.transpose(-1, -2)) * kept
        dscores = dscores.sub_(delta[..., rows, :]).mul_(weights).mul_(spec.scale)
        dq[..., rows, :] = dscores @ keys
        dk += (dscores.transpose(-1, -2) @ queries[..., rows, :]).sum(2, keepdim=True)
    return _sequence_first(dq), _sequence_first(dk), _sequence_first(dv)


def _heads_first(t: torch.Tensor, g: int) -> torch.Tensor:
    """[s, b, heads, size] -> [b, g, heads / g, s, size] in the dtype of the sums."""
    wide = torch.float64 if t.dtype == torch.float64 else torch.float32
    return t.permute(1, 2, 0, 3).to(wide).unflatten(1, (g, -1))  # type: ignore[no-untyped-call, no-any-return]


def _sequence_first(t: torch.Tensor) -> torch.Tensor:
    return t.flatten(1, 2).permute(2, 0, 1, 3).contiguous()


def _rows(batches: int, sq: int, sk: int) -> Iterator[slice]:
    size = max(1, min(sq, _SCORES // max(1, batches * sk)))
    for first in range(0, sq, size):
        yield slice(first, min(first + size, sq))


def _scores(queries: torch.Tensor, keys: torch.Tensor, spec: AttentionSpec, rows: slice, sk: int) -> torch.Tensor:
    """[b, g, n / g, rows, sk], -inf where the key is hidden."""
    scores = (queries[..., rows, :] @ keys.transpose(-1, -2)).mul_(spec.scale)
    sq, positions = queries.shape[3], spec.positions
    if positions is not None:
        hidden = band.hidden(sq, sk, positions, queries.device)[rows]
        scores.masked_fill_(hidden, float("-inf"))
    if spec.mask is not None:
        b, g, ratio = scores.shape[:3]
        mask = spec.mask.expand(b, g * ratio, sq, sk)[..., rows, :]
        scores.masked_fill_(mask.unflatten(1, (g, ratio)), float("-inf"))  # type: ignore[no-untyped-call]
    return scores


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse), 0 in rows that see no key."""
    return (scores - lse.masked_fill(lse == float("-inf"), float("inf")).unsqueeze(-1)).exp_()
