"""attention on CPU: our own kernel (`cpu_native`) on processors with AVX-512, else PyTorch's flash kernel.

Neither writes the [sq, sk] scores to memory. What follows is about PyTorch's.

The kernel takes grouped key heads and strided inputs as they are. It has one head size for q, k and v, and a causal
order that starts at the first key. Where it does not apply PyTorch silently takes a path that builds several
[sq, sk] matrices per head, so such a call is padded or given a mask: one [sq, sk] mask per window, shared by all
calls, and for the duration of the call an additive form of a mask given by the caller. It has no dropout, which is
computed by `blocked`.

The backward kernel adds the contributions of all query blocks and of all query heads of a group to dk and dv
in the dtype of its inputs. In bf16 or fp16 that is a rounding per block, and the error grows with the
sequence beyond that of plain matrix products. Its inputs are therefore widened to fp32, which takes memory of
the order of q, k and v for the duration of the call, and the gradients are rounded once. (A compiled graph
keeps PyTorch's own backward, and the definition for dropout, a sink or the log-sum-exp.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.attention import autograd, band, blocked, cpu_native, layout, reference

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention import Case

# Internal to PyTorch, so they may go: then this backend has a reason not to serve.
_FORWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def supported(case: Case) -> list[str]:
    reasons = []
    if _FORWARD is None or _BACKWARD is None:
        reasons.append(f"torch {torch.__version__} has no flash kernel for the CPU under its known name")
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        reasons.append(f"dtype {case.dtype}")
    return reasons


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
    if torch.compiler.is_compiling():
        if dropout_p > 0.0 or sink is not None or return_lse:
            return reference.attention(q, k, v, **how, dropout_p=dropout_p, return_lse=return_lse)
        return _compiled(q, k, v, causal, mask, scale, window)
    if _native(q, v):
        pair = autograd.attention(cpu_native.kernels(dropout_p), q, k, v, **how)
    elif dropout_p > 0.0:
        return blocked.attention(q, k, v, **how, dropout_p=dropout_p, return_lse=return_lse)
    else:
        pair = autograd.attention(_KERNELS, q, k, v, **how)
    return pair if return_lse else pair[0]


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
    if _native(q, v):
        return cpu_native.forward(q, k, v, causal=causal, mask=mask, scale=scale, window=window)
    return _flash_forward(q, k, v, causal=causal, mask=mask, scale=scale, window=window)


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
    run = cpu_native.backward if _native(q, v) else _flash_backward
    return run(dout, q, k, v, out, lse, causal=causal, mask=mask, scale=scale, window=window)


def _native(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernel of our own takes the call; says once why the machine has none."""
    if not cpu_native.takes(q, v) or isinstance(q, FakeTensor):
        return False
    reason = cpu_native.unusable()
    if reason is not None:
        dispatch.report_fallback("attention", "cpu", (reason,), to="PyTorch's flash kernel")
    return reason is None


def _flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    window: band.Window | None,
) -> autograd.Pair:
    call = _call(q, k, v, causal, mask, window)
    out, lse = _FORWARD.default(
        call.q, call.k, call.v, 0.0, call.causal, attn_mask=_additive(call.mask, q.dtype), scale=scale
    )
    b = q.shape[1]
    return call.out(out, b, v.shape[3]), call.lse(lse, b)


def _flash_backward(
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
    dtype, (b, d, dv) = _wide(q.dtype), (q.shape[1], q.shape[3], v.shape[3])
    call = _call(q.to(dtype), k.to(dtype), v.to(dtype), causal, mask, window)
    dout, out = (call.rows(layout.pad(_rows(t).to(dtype), max(d, dv))) for t in (dout, out))
    dq, dk, dv_ = _BACKWARD.default(
        dout,
        call.q,
        call.k,
        call.v,
        out,
        call.given_lse(lse),
        0.0,
        call.causal,
        attn_mask=_additive(call.mask, dtype),
        scale=scale,
    )
    return (
        call.gradient(dq, b, d).to(q.dtype),
        call.gradient(dk, b, d).to(q.dtype),
        call.gradient(dv_, b, dv).to(q.dtype),
    )


_KERNELS = autograd.Kernels(_flash_forward, _flash_backward)


def _compiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    window: band.Window | None,
) -> torch.Tensor:
    call = _call(q, k, v, causal, mask, window)
    out = torch.nn.functional.scaled_dot_product_attention(
        call.q,
        call.k,
        call.v,
        attn_mask=call.mask,
        is_causal=call.causal,
        scale=scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )
    return call.out(out, q.shape[1], v.shape[3])


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    window: band.Window | None,
) -> layout.Call:
    return layout.call(
        _rows(q),
        _rows(k),
        _rows(v),
        causal=causal,
        mask=mask,
        window=window,
        grouped=True,
        padded=True,
        mask_dtype=_wide(q.dtype),
    )


def _rows(t: torch.Tensor) -> torch.Tensor:
    """The kernel reads a row of a head as one run of memory."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A bool mask as 0 where it is True and -inf elsewhere; an additive one as it is."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
