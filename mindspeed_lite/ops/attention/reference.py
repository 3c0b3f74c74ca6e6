"""Reference attention in plain PyTorch; without autograd the reference is `blocked`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_lite.ops.attention.blocked import backward as backward
from mindspeed_lite.ops.attention.blocked import forward as forward
from mindspeed_lite.ops.rows import precision

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention.packed import Packing
    from mindspeed_lite.ops.attention.spec import AttentionSpec


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """softmax(scale * q k^T, masked) v with materialised [sq, sk] scores, in fp32 (float64 for float64)."""
    sq, b, n, _d = q.shape
    sk, _, g, dv = v.shape
    dtype = precision(q.dtype)
    scores, empty = _scores(q, k, spec)
    sink = spec.sink
    if sink is not None:
        # The sink adds to the denominator only.
        logit = sink.to(dtype).reshape(1, n, 1, 1).expand(b, n, sq, 1)
        probs = torch.cat([scores, logit], -1).softmax(-1)[..., :-1]
    else:
        probs = scores.softmax(-1)
    if empty is not None:
        probs = probs.masked_fill(empty, 0.0)
    probs = torch.nn.functional.dropout(probs, spec.dropout_p, training=spec.dropout_p > 0)  # [b, n, sq, sk]
    context = probs.reshape(b, g, n // g * sq, sk) @ v.to(dtype).permute(1, 2, 0, 3)  # [b, g, n / g * sq, dv]
    return context.reshape(b, n, sq, dv).permute(2, 0, 1, 3).to(q.dtype).contiguous()


def packed(q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: AttentionSpec) -> Tensor:
    rows, n = q.shape[:2]
    # Padding rows stay connected to the graph.
    out = (q.sum() + k.sum() + v.sum()) * q.new_zeros(rows, n, v.shape[2])
    for (first, last), (low, high) in zip(packing.q, packing.k, strict=True):
        queries, keys, values = (t.unsqueeze(1) for t in (q[first:last], k[low:high], v[low:high]))
        its = attention(queries, keys, values, spec.for_lengths(last - first, high - low))
        out = torch.cat([out[:first], its.squeeze(1), out[last:]])
    return out


def _scores(q: Tensor, k: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """Scores [b, n, sq, sk], -inf where hidden, and the rows without keys of `spec.hidden`, which are not masked."""
    sq, b, n, d = q.shape
    sk, _, g, _ = k.shape
    dtype = precision(q.dtype)
    queries = q.to(dtype).permute(1, 2, 0, 3).reshape(b, g, n // g * sq, d)
    scores = (queries @ k.to(dtype).permute(1, 2, 3, 0)).reshape(b, n, sq, sk) * spec.scale
    if spec.mask is None and spec.positions is None:
        return scores, None
    hidden, empty = spec.hidden(sq, sk, q.device)
    return scores.masked_fill(hidden, float("-inf")), empty
