"""attention on CUDA through PyTorch's fused kernels.

scaled_dot_product_attention chooses in `cuda_flash`'s order. Calls it does not support (lse, sink, window, causal with
fewer queries than keys) run flash directly for 16 bit without mask, else memory-efficient. Key heads are repeated
where PyTorch would use the math path.

`blocked` serves windows without flash (fp32, heads above 256, dropout), fp32 masks, and dropout with lse or sink; other
masks become a 16-bit bias [sq, sk]. Under torch.compile: SDPA with a bias, or the reference for lse and sink, since
PyTorch 2.11's fake kernel of the memory-efficient backward rejects its own schema.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_lite.ops.attention import autograd, blocked, cuda_flash, layout, reference
from mindspeed_lite.ops.attention import cuda_kernels as kernels

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention.spec import AttentionSpec, Case


def supported(case: Case) -> list[str]:
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return [f"dtype {case.dtype}: PyTorch's fused CUDA kernels take float16, bfloat16 and float32"]
    return []


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    by_itself = spec.sink is not None or spec.return_lse
    if torch.compiler.is_compiling():
        return reference.attention(q, k, v, spec) if by_itself else (_sdpa(q, k, v, spec), None)
    positions = spec.window is not None or (spec.causal and q.shape[0] != k.shape[0])
    if spec.dropout_p > 0.0:
        if by_itself or positions or _is_wide(spec):
            return blocked.attention(q, k, v, spec)
    elif by_itself or positions or _is_wide(spec):
        return autograd.attention(_KERNELS, q, k, v, spec)
    return _sdpa(q, k, v, spec), None


def _is_wide(spec: AttentionSpec) -> bool:
    """Whether a bias [sq, sk] would be built in fp32, or for a window alone."""
    if spec.mask is None:
        return spec.window is not None
    return spec.case.dtype == torch.float32


def _sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    d, dv = q.shape[3], v.shape[3]
    # Only flash takes grouped key heads: 16 bit, one head size up to 256, no mask.
    masked = spec.mask is not None or spec.window is not None or (spec.causal and q.shape[0] != k.shape[0])
    grouped = not masked and d == dv <= 256 and q.dtype in (torch.float16, torch.bfloat16)
    call = layout.call(q, k, v, spec, grouped=grouped)
    with cuda_flash.order(masked=call.mask is not None, queries=q.shape[0], keys=k.shape[0]):
        out = torch.nn.functional.scaled_dot_product_attention(
            call.q,
            call.k,
            call.v,
            attn_mask=call.mask,
            dropout_p=spec.dropout_p,
            is_causal=call.causal,
            scale=spec.scale,
            enable_gqa=call.q.shape[1] != call.k.shape[1],
        )
    return call.out(out, q.shape[1])


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> autograd.Pair:
    if kernels.flash_serves(spec):
        return kernels.flash_forward(q, k, v, spec)
    return (blocked.forward if _is_wide(spec) else kernels.efficient_forward)(q, k, v, spec)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> autograd.Triple:
    if kernels.flash_serves(spec):
        return kernels.flash_backward(dout, q, k, v, out, lse, spec)
    return (blocked.backward if _is_wide(spec) else kernels.efficient_backward)(dout, q, k, v, out, lse, spec)


_KERNELS = autograd.Kernels(forward, backward)


def why_not_packed(case: Case) -> list[str]:
    """Reasons why a pack's sequences run one by one."""
    reasons = kernels.why_not_flash(case)
    if case.dropout:
        reasons.append("dropout")
    return reasons


def packed(
    q: Tensor, k: Tensor, v: Tensor, queries: tuple[int, ...], keys: tuple[int, ...], spec: AttentionSpec
) -> autograd.Pair:
    """q [t, n, d], k [u, g, d], v [u, g, dv] with these lengths -> (out [t, n, dv], lse [n, t])."""
    ends = kernels.Ends.of(queries, keys, q.device)
    both = autograd.Kernels(
        functools.partial(kernels.flash_forward, ends=ends), functools.partial(kernels.flash_backward, ends=ends)
    )
    out, lse = autograd.attention(both, q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), spec)
    return out.squeeze(1), lse.squeeze(0)
