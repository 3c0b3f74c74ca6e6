"""attention on CPU: our own kernel (`cpu_native`) for bf16 and fp32, else PyTorch's flash kernel.

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
from mindspeed_lite.ops.attention import autograd, blocked, cpu_native, layout, reference

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention.spec import AttentionSpec, Case

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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if torch.compiler.is_compiling():
        if spec.dropout_p > 0.0 or spec.sink is not None or spec.return_lse:
            return reference.attention(q, k, v, spec)
        return _compiled(q, k, v, spec), None
    if spec.dropout_p > 0.0:
        spec = cpu_native.drawn(spec) if _native(q, spec) else blocked.drawn(spec, q.device)
    return autograd.attention(_KERNELS, q, k, v, spec)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, *, wide: bool = False
) -> autograd.Pair:
    if _native(q, spec):
        return cpu_native.forward(q, k, v, spec, wide=wide)
    if wide:
        return forward(q.float(), k.float(), v.float(), spec.of_fp32())
    return (_flash_forward if spec.rng is None else blocked.forward)(q, k, v, spec)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: AttentionSpec,
    *,
    wide: bool = False,
) -> autograd.Triple:
    if _native(q, spec):
        return cpu_native.backward(dout, q, k, v, out, lse, spec, wide=wide)
    if wide:
        return backward(dout.float(), q.float(), k.float(), v.float(), out.float(), lse, spec.of_fp32())
    return (_flash_backward if spec.rng is None else blocked.backward)(dout, q, k, v, out, lse, spec)


# For 16-bit inputs our kernel can leave its fp32 sums unrounded, and PyTorch's takes the inputs in fp32.
HAS_WIDE = True
_KERNELS = autograd.Kernels(forward, backward)


def _native(q: torch.Tensor, spec: AttentionSpec) -> bool:
    """Whether the kernel of our own takes the call; says once why the machine has none.

    Dropout that was drawn for one kernel means nothing to the other.
    """
    case, rng = spec.case, spec.rng
    if not cpu_native.takes(case) or isinstance(q, FakeTensor) or not (rng is None or isinstance(rng, int)):
        return False
    reason = cpu_native.unusable()
    if reason is None:
        return True
    if rng is not None:
        raise RuntimeError(f"attention: the kernel that drew a call's dropout can no longer be used: {reason}")
    dispatch.report_fallback("attention", "cpu", (reason,), to="PyTorch's flash kernel")
    return False


def _flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> autograd.Pair:
    call = _call(q, k, v, spec)
    out, lse = _FORWARD.default(
        call.q, call.k, call.v, 0.0, call.causal, attn_mask=_additive(call.mask, q.dtype), scale=spec.scale
    )
    if call.mask is not None and _has_nan(out):
        return blocked.forward(q, k, v, spec)
    b = q.shape[1]
    return call.out(out, b, v.shape[3]), call.lse(lse, b)


def _flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: AttentionSpec,
) -> autograd.Triple:
    dtype, (b, d, dv) = _wide(q.dtype), (q.shape[1], q.shape[3], v.shape[3])
    call = _call(q.to(dtype), k.to(dtype), v.to(dtype), spec)
    grad, result = (call.rows(layout.pad(_rows(t).to(dtype), max(d, dv))) for t in (dout, out))
    dq, dk, dv_ = _BACKWARD.default(
        grad,
        call.q,
        call.k,
        call.v,
        result,
        call.given_lse(lse),
        0.0,
        call.causal,
        attn_mask=_additive(call.mask, dtype),
        scale=spec.scale,
    )
    if call.mask is not None and _has_nan(dv_):
        return blocked.backward(dout, q, k, v, out, lse, spec)
    return (
        call.gradient(dq, b, d).to(q.dtype),
        call.gradient(dk, b, d).to(q.dtype),
        call.gradient(dv_, b, dv).to(q.dtype),
    )


def _has_nan(t: torch.Tensor) -> bool:
    """Whether a hidden score may have been infinite or NaN: the kernel adds -inf to it, where it should be replaced."""
    return not isinstance(t, FakeTensor) and bool(t.isnan().any())


def _compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    call = _call(q, k, v, spec)
    out = torch.nn.functional.scaled_dot_product_attention(
        call.q,
        call.k,
        call.v,
        attn_mask=call.mask,
        is_causal=call.causal,
        scale=spec.scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )
    return call.out(out, q.shape[1], v.shape[3])


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> layout.Call:
    return layout.call(_rows(q), _rows(k), _rows(v), spec, grouped=True, padded=True, mask_dtype=_wide(q.dtype))


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
