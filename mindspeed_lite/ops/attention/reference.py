"""The definition of attention in plain PyTorch: what every backend is tested against."""

from __future__ import annotations

import torch

from mindspeed_lite.ops.attention import band


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: band.Window | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T, masked) v, every [sq, sk] matrix written out, in fp32 (float64 for float64)."""
    sq, b, n, d = q.shape
    sk, _, g, dv = v.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = d**-0.5 if scale is None else scale
    queries = q.to(dtype).reshape(sq, b, g, n // g, d)
    scores = torch.einsum("sbgrd,tbgd->bgrst", queries, k.to(dtype)).reshape(b, n, sq, sk) * scale

    causal, window = band.canonical(causal, window, sq, sk)
    positions = band.limits(causal, window)
    hidden = mask
    if positions is not None:
        by_position = band.hidden(sq, sk, positions, q.device)
        hidden = by_position if mask is None else mask | by_position
    if hidden is None:
        probs = scores.softmax(-1)
    else:
        # A row without keys is left unmasked for the softmax and cleared behind it: no NaN either way.
        empty = hidden.all(-1, keepdim=True)
        probs = scores.masked_fill(hidden & ~empty, float("-inf")).softmax(-1).masked_fill(empty, 0.0)
    probs = torch.nn.functional.dropout(probs, dropout_p, training=dropout_p > 0)  # [b, n, sq, sk]
    context = torch.einsum("bgrst,tbgd->sbgrd", probs.reshape(b, g, n // g, sq, sk), v.to(dtype))
    return context.reshape(sq, b, n, dv).to(q.dtype).contiguous()
