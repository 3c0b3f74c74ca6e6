"""attention on CUDA through PyTorch's fused kernels.

scaled_dot_product_attention chooses in `cuda_flash`'s order. Calls it does not support (sink, window, causal with
fewer queries than keys) run cuDNN or flash directly for 16 bit without mask, else `blocked`, as do windows with dropout
and fp32 masks, whose bias [sq, sk] would be in fp32. Key heads are repeated where PyTorch would use the math path.
Under torch.compile: SDPA with a bias, or the reference for a sink.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mindspeed_lite.ops.attention import autograd, band, blocked, cuda_flash, reference
from mindspeed_lite.ops.attention import cuda_kernels as kernels
from mindspeed_lite.ops.attention.spec import AttentionSpec, Case

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    by_itself = spec.sink is not None
    if torch.compiler.is_compiling():
        return reference.attention(q, k, v, spec) if by_itself else _sdpa(q, k, v, spec)
    positions = spec.window is not None or (spec.causal and q.shape[0] != k.shape[0])
    has_wide_bias = spec.mask is not None and q.dtype == torch.float32
    if not (by_itself or positions or has_wide_bias):
        return _sdpa(q, k, v, spec)
    return blocked.attention(q, k, v, spec) if spec.dropout_p > 0.0 else autograd.attention(_KERNELS, q, k, v, spec)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    (sq, b, n, d), (sk, _, g, dv) = q.shape, v.shape
    causal = spec.causal and sq == sk and spec.mask is None
    visible, empty = (None, None) if causal else _visible(q, sk, spec)
    # Only flash takes grouped key heads: 16 bit, one head size up to 256, no mask.
    if n != g and not (visible is None and d == dv <= 256 and q.dtype in (torch.float16, torch.bfloat16)):
        k, v = (t.repeat_interleave(n // g, dim=2) for t in (k, v))
    # With batch and heads folded the kernel writes [s, b * n, d], the layout to return; else [b, s, n, d].
    folded = b > 1 and (visible is None or visible.dim() == 2 or visible.shape[:2] == (1, 1))
    q, k, v = (t.flatten(1, 2).transpose(0, 1).unsqueeze(0) if folded else t.permute(1, 2, 0, 3) for t in (q, k, v))
    is_served = q.dtype in (torch.float16, torch.bfloat16) and max(d, dv) <= 128
    with cuda_flash.order(masked=visible is not None, queries=sq, keys=sk, is_served=is_served):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, dropout_p=spec.dropout_p, is_causal=causal, scale=spec.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
    out = (out.view(b, n, sq, dv) if folded else out).permute(2, 0, 1, 3)
    return (out if empty is None else out.masked_fill(empty.permute(2, 0, 1, 3), 0.0)).contiguous()


def _visible(q: Tensor, sk: int, spec: AttentionSpec) -> tuple[Tensor | None, Tensor | None]:
    """The mask in PyTorch's sense, and the rows [b | 1, n | 1, sq, 1] without keys by the caller's mask."""
    sq = q.shape[0]
    if spec.mask is None:
        return None if spec.positions is None else ~band.hidden(sq, sk, spec.positions, q.device), None
    hidden, empty = spec.hidden(sq, sk, q.device)
    # Kernels want the last two dimensions materialised.
    return (~hidden).expand(*hidden.shape[:2], sq, sk), empty


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> autograd.Pair:
    return _kernels_of(q, k, v, spec).forward(q, k, v, spec)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> autograd.Triple:
    return _kernels_of(q, k, v, spec).backward(dout, q, k, v, out, lse, spec)


def _kernels_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> autograd.Kernels:
    if not kernels.flash_serves(spec):
        return autograd.Kernels(blocked.forward, blocked.backward)
    if kernels.takes_cudnn(q, k, v, spec):
        return autograd.Kernels(kernels.cudnn_forward, kernels.cudnn_backward)
    return autograd.Kernels(kernels.flash_forward, kernels.flash_backward)


_KERNELS = autograd.Kernels(forward, backward)


def why_not_packed(case: Case) -> list[str]:
    """Reasons why a pack's sequences run one by one."""
    reasons = kernels.why_not_flash(case)
    if case.dropout:
        reasons.append("dropout")
    return reasons


def packed(
    q: Tensor, k: Tensor, v: Tensor, queries: tuple[int, ...], keys: tuple[int, ...], spec: AttentionSpec
) -> Tensor:
    """q [t, n, d], k [u, g, d], v [u, g, dv] with these lengths -> [t, n, dv]."""
    ends = kernels.Ends.of(queries, keys, q.device)
    both = autograd.Kernels(
        functools.partial(kernels.flash_forward, ends=ends), functools.partial(kernels.flash_backward, ends=ends)
    )
    return autograd.attention(both, q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), spec).squeeze(1)
