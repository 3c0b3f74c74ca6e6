"""attention on CPU through PyTorch's flash kernel, which never writes the [sq, sk] scores to memory.

The kernel takes grouped key heads and strided inputs as they are. It has no dropout, one head size for q, k
and v, and a causal order that starts at the first key. Where it does not apply PyTorch silently takes a path
that builds several [sq, sk] matrices per head, so such a case is refused here, padded, or given a mask.

The backward kernel adds the contributions of all query blocks and of all query heads of a group to dk and dv
in the dtype of its inputs. In bf16 or fp16 that is a rounding per block, and the error grows with the
sequence beyond that of plain matrix products. Its inputs are therefore widened to fp32, which takes memory of
the order of q, k and v for the duration of the call, and the gradients are rounded once. (A compiled graph
keeps PyTorch's own backward.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops.attention import _sdpa, band

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
    if case.dropout:
        reasons.append("dropout: PyTorch's CPU flash kernel has none")
    if case.empty_rows:
        reasons.append("a causal band with more queries than keys leaves rows without keys")
    return reasons


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
    # The kernel reads rows of a head as one run of memory.
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return _sdpa.attention(
        _sdpa.torch_kernel if torch.compiler.is_compiling() else _flash,
        q,
        k,
        v,
        causal=causal,
        mask=mask,
        scale=scale,
        dropout_p=dropout_p,
        window=window,
        grouped=True,
        padded=True,
        mask_dtype=_wide(q.dtype),
    )


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> torch.Tensor:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out: torch.Tensor = _Flash.apply(q, k, v, mask, causal, scale)  # type: ignore[no-untyped-call]
        return out
    return _forward(q, k, v, mask, causal, scale)[0]


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        out, lse = _forward(q, k, v, mask, causal, scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)  # a bool mask stays bool: a byte per score, not four
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        dtype = _wide(q.dtype)
        if dout.stride(-1) != 1:
            dout = dout.contiguous()
        grads = _BACKWARD.default(
            dout.to(dtype),
            q.to(dtype),
            k.to(dtype),
            v.to(dtype),
            out.to(dtype),
            lse,
            0.0,
            ctx.causal,
            attn_mask=_additive(mask, dtype),
            scale=ctx.scale,
        )
        dq, dk, dv = (
            grad.to(q.dtype) if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad[:3], strict=True)
        )
        return dq, dk, dv, None, None, None


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, heads, s, size], and the log of the softmax's denominator [b, heads, s] in fp32."""
    out, lse = _FORWARD.default(q, k, v, 0.0, causal, attn_mask=_additive(mask, q.dtype), scale=scale)
    return out, lse


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A bool mask as 0 where it is True and -inf elsewhere; an additive one as it is."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
