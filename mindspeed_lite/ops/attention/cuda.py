"""attention on CUDA through PyTorch's fused kernels.

Where a call is what scaled_dot_product_attention takes, PyTorch chooses among flash, cuDNN and memory-efficient. What
it does not say or take (log-sum-exp, sink, window, causal order with fewer queries than keys) calls the kernels
themselves: flash for 16 bit and no mask, which masks a window by position, else memory-efficient. Where PyTorch's
own choice would be the path that writes the scores out, key heads are repeated, or a mask is built: one [sq, sk] mask
per window (fp32, or differing head sizes), and what a mask of the caller needs.

Dropout beside a log-sum-exp or a sink is computed by `blocked`; a compiled graph has the definition for these two,
since PyTorch 2.11's fake kernel of the memory-efficient backward refuses its own schema.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_lite.ops.attention import autograd, band, blocked, layout, reference
from mindspeed_lite.ops.attention import cuda_kernels as kernels

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention import Case


def supported(case: Case) -> list[str]:
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return [f"dtype {case.dtype}: PyTorch's fused CUDA kernels take float16, bfloat16 and float32"]
    return []


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    window: band.Window | None,
    sink: torch.Tensor | None,
    return_lse: bool,
) -> Any:
    how: dict[str, Any] = dict(causal=causal, mask=mask, scale=scale, window=window, sink=sink)
    by_itself = sink is not None or return_lse
    compiling = torch.compiler.is_compiling()
    if by_itself and (dropout_p > 0.0 or compiling):
        other = reference.attention if compiling else blocked.attention
        return other(q, k, v, **how, dropout_p=dropout_p, return_lse=return_lse)
    by_position = not compiling and (window is not None or (causal and q.shape[0] != k.shape[0]))
    if by_itself or (by_position and dropout_p == 0.0 and kernels.flash_serves(q, v, mask)):
        pair = autograd.attention(_KERNELS, q, k, v, **how)
        return pair if return_lse else pair[0]
    return _sdpa(q, k, v, causal, mask, scale, dropout_p, window)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    window: band.Window | None,
) -> torch.Tensor:
    d, dv = q.shape[3], v.shape[3]
    # Only the flash kernel takes grouped key heads: 16 bit, one head size of at most 256, and no mask.
    masked = mask is not None or window is not None or (causal and q.shape[0] != k.shape[0])
    grouped = not masked and d == dv <= 256 and q.dtype in (torch.float16, torch.bfloat16)
    call = layout.call(q, k, v, causal=causal, mask=mask, window=window, grouped=grouped, padded=False)
    out = torch.nn.functional.scaled_dot_product_attention(
        call.q,
        call.k,
        call.v,
        attn_mask=call.mask,
        dropout_p=dropout_p,
        is_causal=call.causal,
        scale=scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )
    return call.out(out, q.shape[1], dv)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    window: band.Window | None,
) -> autograd.Pair:
    if kernels.flash_serves(q, v, mask):
        return kernels.flash_forward(q, k, v, band.limits(causal, window), scale)
    return kernels.efficient_forward(q, k, v, causal, mask, scale, window)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    window: band.Window | None,
) -> autograd.Triple:
    if kernels.flash_serves(q, v, mask):
        return kernels.flash_backward(dout, q, k, v, out, lse, band.limits(causal, window), scale)
    return kernels.efficient_backward(dout, q, k, v, out, lse, causal, mask, scale, window)


_KERNELS = autograd.Kernels(forward, backward)


def why_not_packed(case: Case) -> list[str]:
    """Why the sequences of a pack go one after the other."""
    reasons = kernels.why_not_flash(case.dtype, case.head_size, case.value_size)
    if case.dropout:
        reasons.append("dropout")
    return reasons


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    *,
    causal: bool,
    scale: float,
    dropout_p: float,
    window: band.Window | None,
    sink: torch.Tensor | None,
    return_lse: bool,
) -> Any:
    """q [t, n, d], k [u, g, d], v [u, g, dv], sequences of these lengths; (out [t, n, dv], lse [n, t]) on request."""
    ends = kernels.Ends.of(queries, keys, q.device)
    pair = autograd.attention(
        autograd.Kernels(functools.partial(_forward_packed, ends), functools.partial(_backward_packed, ends)),
        *(t.unsqueeze(1) for t in (q, k, v)),
        causal=causal,
        mask=None,
        scale=scale,
        window=window,
        sink=sink,
    )
    out, lse = pair[0].squeeze(1), pair[1].squeeze(0)
    return (out, lse) if return_lse else out


def _forward_packed(
    ends: kernels.Ends,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    mask: None,
    scale: float,
    window: band.Window | None,
) -> autograd.Pair:
    return kernels.flash_forward(q, k, v, band.limits(causal, window), scale, ends)


def _backward_packed(
    ends: kernels.Ends,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    mask: None,
    scale: float,
    window: band.Window | None,
) -> autograd.Triple:
    return kernels.flash_backward(dout, q, k, v, out, lse, band.limits(causal, window), scale, ends)
