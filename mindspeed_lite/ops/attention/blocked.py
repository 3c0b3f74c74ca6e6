"""attention in plain PyTorch, a block of rows at a time: every option, and memory that grows with no S x S.

For what no kernel of a device has. Rows are cut so that the scores of one block stay below a fixed size, and keys
that a block's rows cannot see by position are not touched. Scores and all sums are fp32 (float64 for float64).

Dropout draws from the device's default generator in the order of the blocks. The generator's state from before is
kept, and the backward pass draws the same numbers again from it; nothing of the mask is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from mindspeed_lite.ops.attention import autograd, band

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention.spec import AttentionSpec

# Scores of one block. fp32: 4 MiB, of which a block holds a few, in a core's cache or near it.
_SCORES = 1 << 20

# With a band, few rows at a time, so that most keys of a block are seen by its rows.
_BAND_ROWS = 256


class _Block(NamedTuple):
    """One product of rows and keys; batches count (batch, key head) pairs."""

    batches: slice
    rows: slice
    keys: slice


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> autograd.Pair:
    """As a backend's."""
    return autograd.attention(_KERNELS, q, k, v, drawn(spec, q.device) if spec.dropout_p > 0.0 else spec)


def drawn(spec: AttentionSpec, device: torch.device) -> AttentionSpec:
    """With the generator's state, from which both passes draw the same numbers."""
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return spec._replace(rng=state)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> autograd.Pair:
    (sq, b, n, _), (sk, _, g, dv) = q.shape, v.shape
    ratio = n // g
    queries, keys, values = _batched(q, g), _batched(k, g), _batched(v, g)
    out = queries.new_zeros(b * g, ratio, sq, dv)
    lse = queries.new_full((b * g, ratio, sq), float("-inf"))
    hidden = _Hidden(spec, (b, n, g, sq, sk), q.device)
    for block in _blocks(b * g, ratio, sq, sk, hidden.positions):
        scores = _scores(queries, keys, block, spec.scale)  # [batches, ratio, rows, keys]
        hidden.hide(scores, block)
        # A row without keys has the maximum -inf, and exp(-inf - inf) is 0 throughout.
        most = _finite(scores.amax(-1, keepdim=True))
        weights = scores.sub_(most).exp_()
        total = weights.sum(-1, keepdim=True)
        lse[block.batches, :, block.rows] = torch.where(total > 0, total.log() + most, -most).squeeze(-1)
        if spec.dropout_p > 0.0:
            weights.mul_(_kept(weights, spec.dropout_p, None))
        values_ = values[block.batches, 0, block.keys]
        context = torch.bmm(weights.flatten(1, 2), values_).view(*weights.shape[:-1], dv)
        out[block.batches, :, block.rows] = context.div_(total.clamp_min_(torch.finfo(total.dtype).tiny))
    return _unbatched(out, b).to(q.dtype), lse.view(b, n, sq)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: AttentionSpec,
) -> autograd.Triple:
    (sq, b, n, _), (sk, _, g, _) = q.shape, v.shape
    ratio = n // g
    queries, keys, values, douts = _batched(q, g), _batched(k, g), _batched(v, g), _batched(dout, g)
    delta = (douts * _batched(out, g)).sum(-1, keepdim=True)
    lse = _finite(lse.to(queries.dtype)).reshape(b * g, ratio, sq, 1)
    dq, dk, dv = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    generator = None
    if spec.dropout_p > 0.0:
        generator = torch.Generator(q.device)
        generator.set_state(spec.rng)
    hidden = _Hidden(spec, (b, n, g, sq, sk), q.device)
    for block in _blocks(b * g, ratio, sq, sk, hidden.positions):
        batches, rows, cols = block
        probs = _scores(queries, keys, block, spec.scale)
        hidden.hide(probs, block)
        probs.sub_(lse[batches, :, rows]).exp_()
        grad = douts[batches, :, rows].flatten(1, 2)  # [batches, ratio * rows, dv]
        dprobs = torch.bmm(grad, values[batches, 0, cols].transpose(1, 2)).view_as(probs)
        weights = probs
        if generator is not None:
            kept = _kept(probs, spec.dropout_p, generator)
            weights = probs * kept
            dprobs.mul_(kept)
        dv[batches, 0, cols] += torch.bmm(weights.flatten(1, 2).transpose(1, 2), grad)
        dscores = dprobs.sub_(delta[batches, :, rows]).mul_(probs).mul_(spec.scale).flatten(1, 2)
        dq[batches, :, rows] = torch.bmm(dscores, keys[batches, 0, cols]).view_as(dq[batches, :, rows])
        dk[batches, 0, cols] += torch.bmm(dscores.transpose(1, 2), queries[batches, :, rows].flatten(1, 2))
    return _unbatched(dq, b).to(q.dtype), _unbatched(dk, b).to(k.dtype), _unbatched(dv, b).to(v.dtype)


_KERNELS = autograd.Kernels(forward, backward)


def _batched(t: torch.Tensor, g: int) -> torch.Tensor:
    """[s, b, heads, size] -> [b * g, heads / g, s, size], contiguous in the dtype of the sums."""
    s, b, heads, size = t.shape
    wide = torch.float64 if t.dtype == torch.float64 else torch.float32
    return t.permute(1, 2, 0, 3).to(wide).reshape(b * g, heads // g, s, size)


def _unbatched(t: torch.Tensor, b: int) -> torch.Tensor:
    """[b * g, heads / g, s, size] -> [s, b, heads, size], contiguous."""
    return t.view(b, -1, *t.shape[2:]).permute(2, 0, 1, 3).contiguous()


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """+inf in place of -inf, so that exp(score - lse) is 0 throughout a row without keys, and not NaN."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def _scores(queries: torch.Tensor, keys: torch.Tensor, block: _Block, scale: float) -> torch.Tensor:
    rows = queries[block.batches, :, block.rows]
    batches, ratio, length, _ = rows.shape
    scores = torch.bmm(rows.flatten(1, 2), keys[block.batches, 0, block.keys].transpose(1, 2))
    return scores.mul_(scale).view(batches, ratio, length, -1)


def _blocks(batches: int, ratio: int, sq: int, sk: int, positions: band.Window | None) -> Iterator[_Block]:
    """Blocks in a fixed order: first rows, then (batch, key head) pairs."""
    rows = max(1, min(sq, _SCORES // (ratio * sk)))
    left, right = (-1, -1) if positions is None else positions
    if positions is not None:
        rows = min(rows, _BAND_ROWS)
    for first in range(0, sq, rows):
        last = min(first + rows, sq)
        low = 0 if left < 0 else max(0, first + sk - sq - left)
        high = sk if right < 0 else min(sk, last + sk - sq + right)
        together = max(1, _SCORES // (ratio * (last - first) * (high - low)))
        for batch in range(0, batches, together):
            yield _Block(slice(batch, min(batch + together, batches)), slice(first, last), slice(low, high))


class _Hidden:
    """The caller's mask and the band, a block at a time."""

    def __init__(self, spec: AttentionSpec, sizes: tuple[int, int, int, int, int], device: torch.device) -> None:
        b, n, g, sq, sk = sizes
        self.positions, self.sq, self.sk, self.device = spec.positions, sq, sk, device
        self.mask, mask = None, spec.mask
        if mask is not None:
            whole = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
            self.mask = whole.expand(b, n, sq, sk).unflatten(1, (g, n // g))  # type: ignore[no-untyped-call]
            self.groups = g

    def hide(self, scores: torch.Tensor, block: _Block) -> None:
        """-inf where the key is hidden."""
        batches, rows, keys = block
        left, right = (-1, -1) if self.positions is None else self.positions
        # A row's own key within the block, for the first row and the last.
        first = rows.start + self.sk - self.sq - keys.start
        last = first + rows.stop - rows.start - 1
        length = keys.stop - keys.start
        # Only columns that some row sees and another does not are worth a mask.
        if right >= 0 and first + right + 1 < length:
            column = max(0, first + right + 1)
            part = scores[..., column:]
            hidden = torch.ones(part.shape[-2:], dtype=torch.bool, device=self.device)
            part.masked_fill_(hidden.triu_(first + right + 1 - column), float("-inf"))
        if left >= 0 and last - left > 0:
            part = scores[..., : last - left]
            hidden = torch.ones(part.shape[-2:], dtype=torch.bool, device=self.device)
            part.masked_fill_(hidden.tril_(first - left - 1), float("-inf"))
        if self.mask is not None:
            for index, pair in enumerate(range(batches.start, batches.stop)):
                batch, group = divmod(pair, self.groups)
                scores[index].masked_fill_(self.mask[batch, group, :, rows, keys], float("-inf"))


def _kept(like: torch.Tensor, dropout_p: float, generator: torch.Generator | None) -> torch.Tensor:
    """1 / (probability of being kept) where a weight is kept, 0 where it is dropped."""
    if like.device.type != "cpu":
        return torch.empty_like(like).bernoulli_(1.0 - dropout_p, generator=generator).div_(1.0 - dropout_p)
    # Four numbers of 16 bits from each drawn one: PyTorch's bernoulli_ costs more than the rest of a block on CPU.
    # The probability is a multiple of 2^-16, and what is kept is scaled by that probability.
    dropped = min(max(round(dropout_p * 65536), 1), 65535)
    drawn = torch.empty((like.numel() + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None, generator=generator)
    kept = drawn.view(torch.int16)[: like.numel()].view(like.shape) >= dropped - 32768
    return kept.to(like.dtype).mul_(65536 / (65536 - dropped))
