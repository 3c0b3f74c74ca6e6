"""attention in plain PyTorch, one block of rows at a time: every option, no sq x sk memory.

Blocks have a bounded number of scores and skip keys outside their band. Accumulates in fp32 (float64 for float64).
Dropout hashes seed, batch, head and positions: independent of rank and block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops import traced
from mindspeed_lite.ops.attention import autograd
from mindspeed_lite.ops.attention.spec import AttentionSpec
from mindspeed_lite.ops.rows import precision

# Scores of one block; 4 MiB in fp32, near a core's cache.
_SCORES = 1 << 20

# Few rows with a band, so that most keys of a block are visible to its rows.
_BAND_ROWS = 256

# 64-bit odd constants of splitmix64 and the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_DRAWS = 1 << 24


class PositionalDropout(NamedTuple):
    """Dropout mask as a function of positions.

    p: probability, rounded to a multiple of 2^-24; kept weights are scaled by the rounded one.
    seed: one int64 on the device, the same for all parts of one attention.
    rows, keys: [sq] and [sk] int64, global positions of this call's queries and keys.
    first_head, heads: global index of the call's first head, and the number of heads.
    """

    p: float
    seed: Tensor
    rows: Tensor
    keys: Tensor
    first_head: int
    heads: int

    def of_rows(self, rows: slice, keys: slice = slice(None)) -> PositionalDropout:
        """The same for a subset of queries and keys."""
        return self._replace(rows=self.rows[rows], keys=self.keys[keys])

    def scale_of(self, pairs: Tensor) -> Tensor:
        """[*pairs, sq, sk] fp32: 1 / (probability of being kept) where a weight is kept, else 0.

        pairs: int64, batch * heads + the head's index in this call.
        """
        dropped = min(max(round(self.p * _DRAWS), 1), _DRAWS - 1)
        x = _mixed(_mixed((pairs + self.first_head) * _GOLDEN + self.seed).unsqueeze(-1) + self.rows)
        x = _mixed(x.unsqueeze(-1) + self.keys * _GOLDEN)
        return ((x & (_DRAWS - 1)) >= dropped).float().mul_(_DRAWS / (_DRAWS - dropped))


def _mixed(x: Tensor) -> Tensor:
    """The finalizer of splitmix64, with arithmetic shifts."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """`attention` of a backend."""
    return autograd.attention(_KERNELS, q, k, v, drawn(q, k, spec) if spec.dropout_p > 0.0 else spec)


def drawn(q: Tensor, k: Tensor, spec: AttentionSpec) -> AttentionSpec:
    """Adds dropout seeded from the device's default generator; both passes drop the same weights."""
    seed = torch.randint(1 << 62, (1,), device=q.device)
    rows, keys = (torch.arange(t.shape[0], device=q.device) for t in (q, k))
    return spec._replace(rng=PositionalDropout(spec.dropout_p, seed, rows, keys, 0, q.shape[2]))


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> autograd.Pair:
    """`forward` of a backend, unrounded; `spec.rng` is a PositionalDropout or None."""
    (sq, b, n, _), (sk, _, g, dv) = q.shape, v.shape
    queries, keys, values = _batched(q, g), _batched(k, g), _batched(v, g)
    out = queries.new_zeros(b * g, n // g, sq, dv)
    lse = queries.new_full((b * g, n // g, sq), float("-inf"))
    for block in _blocks(spec, b * g, n // g, sq, sk):
        scores = _scores(queries, keys, spec, block)  # [batches, ratio, rows, keys]
        # Maximum -inf would give NaN in a row without keys; +inf gives 0.
        most = _finite(scores.amax(-1, keepdim=True))
        weights = scores.sub_(most).exp_()
        total = weights.sum(-1, keepdim=True)
        lse[block.batches, :, block.rows] = torch.where(total > 0, total.log() + most, -most).squeeze(-1)
        if spec.rng is not None:
            weights.mul_(_kept(spec, block, g, n // g))
        context = torch.bmm(weights.flatten(1, 2), values[block.batches, 0, block.keys])
        context = context.view(*weights.shape[:-1], dv).div_(total.clamp_min_(torch.finfo(total.dtype).tiny))
        out[block.batches, :, block.rows] = context
    return _unbatched(out, b, n), lse.view(b, n, sq)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> autograd.Triple:
    (sq, b, n, _), (sk, _, g, _) = q.shape, v.shape
    queries, keys, values, douts = _batched(q, g), _batched(k, g), _batched(v, g), _batched(dout, g)
    delta = (douts * _batched(out, g)).sum(-1, keepdim=True)
    lse = _finite(lse.to(queries.dtype)).reshape(b * g, n // g, sq, 1)
    dq, dk, dv = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for block in _blocks(spec, b * g, n // g, sq, sk):
        batches, rows, cols = block
        probs = _scores(queries, keys, spec, block).sub_(lse[batches, :, rows]).exp_()
        grad = douts[batches, :, rows].flatten(1, 2)  # [batches, ratio * rows, dv]
        dprobs = torch.bmm(grad, values[batches, 0, cols].transpose(1, 2)).view_as(probs)
        weights = probs
        if spec.rng is not None:
            kept = _kept(spec, block, g, n // g)
            weights = probs * kept
            dprobs.mul_(kept)
        dv[batches, 0, cols] += torch.bmm(weights.flatten(1, 2).transpose(1, 2), grad)
        dscores = dprobs.sub_(delta[batches, :, rows]).mul_(probs).mul_(spec.scale).flatten(1, 2)
        dq[batches, :, rows] = torch.bmm(dscores, keys[batches, 0, cols]).view_as(dq[batches, :, rows])
        dk[batches, 0, cols] += torch.bmm(dscores.transpose(1, 2), queries[batches, :, rows].flatten(1, 2))
    return _unbatched(dq, b, n), _unbatched(dk, b, g), _unbatched(dv, b, g)


_KERNELS = autograd.Kernels(forward, backward)


class _Block(NamedTuple):
    batches: slice
    rows: slice
    keys: slice


def _blocks(spec: AttentionSpec, batches: int, ratio: int, sq: int, sk: int) -> Iterator[_Block]:
    """Blocks in a fixed order: rows first, then (batch, key head) pairs."""
    if traced.dry or not (ratio and sq and sk):
        return
    rows = max(1, min(sq, _SCORES // (ratio * sk)))
    left, right = spec.positions or (-1, -1)
    if spec.positions is not None:
        rows = min(rows, _BAND_ROWS)
    for first in range(0, sq, rows):
        last = min(first + rows, sq)
        low = 0 if left < 0 else max(0, first + sk - sq - left)
        high = sk if right < 0 else min(sk, last + sk - sq + right)
        if high <= low:
            continue
        together = max(1, _SCORES // (ratio * (last - first) * (high - low)))
        for batch in range(0, batches, together):
            yield _Block(slice(batch, min(batch + together, batches)), slice(first, last), slice(low, high))


def _batched(t: Tensor, g: int) -> Tensor:
    """[s, b, heads, size] -> [b * g, heads / g, s, size], contiguous in the accumulation dtype."""
    s, b, heads, size = t.shape
    wide = precision(t.dtype)
    return t.permute(1, 2, 0, 3).to(wide).reshape(b * g, heads // g, s, size)


def _unbatched(t: Tensor, b: int, heads: int) -> Tensor:
    """[b * g, heads / g, s, size] -> [s, b, heads, size], contiguous."""
    return t.view(b, heads, *t.shape[2:]).permute(2, 0, 1, 3).contiguous()


def _finite(lse: Tensor) -> Tensor:
    """Replaces -inf by +inf, so that exp(score - lse) is 0 and not NaN in a row without keys."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def _scores(queries: Tensor, keys: Tensor, spec: AttentionSpec, block: _Block) -> Tensor:
    """Scores [batches, ratio, rows, keys] of a block, -inf where the key is hidden."""
    rows = queries[block.batches, :, block.rows]
    batches, ratio, length, _ = rows.shape
    scores = torch.bmm(rows.flatten(1, 2), keys[block.batches, 0, block.keys].transpose(1, 2))
    scores = scores.mul_(spec.scale).view(batches, ratio, length, -1)
    sq, sk = queries.shape[2], keys.shape[2]
    left, right = spec.positions or (-1, -1)
    # Positions of the first and last row's own key within the block.
    first = block.rows.start + sk - sq - block.keys.start
    last = first + length - 1
    # Only columns visible to some rows and hidden from others need a mask.
    if right >= 0 and first + right + 1 < scores.shape[-1]:
        column = max(0, first + right + 1)
        part = scores[..., column:]
        hidden = torch.ones(part.shape[-2:], dtype=torch.bool, device=scores.device)
        part.masked_fill_(hidden.triu_(first + right + 1 - column), float("-inf"))
    if left >= 0 and last - left > 0:
        part = scores[..., : last - left]
        hidden = torch.ones(part.shape[-2:], dtype=torch.bool, device=scores.device)
        part.masked_fill_(hidden.tril_(first - left - 1), float("-inf"))
    if spec.mask is not None:
        mask = spec.mask.reshape((1,) * (4 - spec.mask.dim()) + tuple(spec.mask.shape))
        groups = spec.case.groups
        mask = mask.expand(queries.shape[0] // groups, groups * ratio, sq, sk)
        for index, pair in enumerate(range(block.batches.start, block.batches.stop)):
            batch, group = divmod(pair, groups)
            heads = slice(group * ratio, (group + 1) * ratio)
            scores[index].masked_fill_(mask[batch, heads, block.rows, block.keys], float("-inf"))
    return scores


def _kept(spec: AttentionSpec, block: _Block, groups: int, ratio: int) -> Tensor:
    dropout: PositionalDropout = spec.rng.of_rows(block.rows, block.keys)
    pair = torch.arange(block.batches.start, block.batches.stop, device=dropout.rows.device)
    head = (pair % groups * ratio).unsqueeze(-1) + torch.arange(ratio, device=pair.device)
    return dropout.scale_of((pair // groups * dropout.heads).unsqueeze(-1) + head)
