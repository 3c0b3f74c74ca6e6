"""rms_norm on CPU: a compiled kernel for bf16 and fp32, blocks of rows where there is none.

The kernel (`cpu.cpp`) brings a row from memory once forward and once backward. It takes rows at any regular distance,
so that heads cut out of one projection (QK-norm) are not copied. Results do not depend on which thread is faster: each
has a fixed share of the rows, and the shares of the weight's gradient are added in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops import native
from mindspeed_lite.ops.dispatch import report_fallback
from mindspeed_lite.ops.rms_norm import blocks, reference
from mindspeed_lite.ops.rows import as_rows
from mindspeed_lite.ops.traced import is_traced

if TYPE_CHECKING:
    from mindspeed_lite.ops.rms_norm import Case

_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_PAIRS = {(x, weight): f"{_NAMES[x]}_{_NAMES[weight]}" for x in _NAMES for weight in _NAMES}

_lib = native.Library(
    Path(__file__).with_name("cpu.cpp"),
    {
        f"rms_norm_{direction}_{pair}": letters
        for pair in _PAIRS.values()
        for direction, letters in (("forward", "ppppppllllfii"), ("backward", "ppppppplllllii"))
    },
    returns_status=True,
)


def supported(case: Case) -> list[str]:
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return [f"dtype {case.dtype}"]
    return []


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    zero_centered: bool = False,
    residual: torch.Tensor | None = None,
) -> Any:
    if is_traced(x) or x.numel() == 0:
        return reference.rms_norm(x, weight, eps, zero_centered, residual)
    pair = _PAIRS.get((x.dtype, weight.dtype))
    if pair is None:
        return blocks.rms_norm(x, weight, eps, zero_centered, residual)
    reason = _lib.unusable()
    if reason is not None:
        report_fallback("rms_norm", "cpu", (reason,), "blocks of rows, by PyTorch")
        return blocks.rms_norm(x, weight, eps, zero_centered, residual)
    return _RMSNorm.apply(x, weight, eps, zero_centered, residual, pair)  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        zero_centered: bool,
        residual: torch.Tensor | None,
        pair: str,
    ) -> Any:
        rows, stride = as_rows(x)
        width, size = weight.shape[0], x.numel()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rstd = x.new_empty(size // width, dtype=torch.float32)
        weight = weight.contiguous()
        total, others, other_stride = x, None, 0
        if residual is not None:
            others, other_stride = as_rows(residual)
            total = torch.empty_like(y)
            ctx.set_materialize_grads(False)
        getattr(_lib, "rms_norm_forward_" + pair)(
            rows,
            others,
            weight,
            y,
            None if others is None else total,
            rstd,
            size // width,
            width,
            stride,
            other_stride,
            eps,
            zero_centered,
            native.threads(size),
        )
        ctx.save_for_backward(total, weight, rstd)
        ctx.zero_centered, ctx.pair = zero_centered, pair
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None = None) -> Any:
        if dy is None:
            return dsum, None, None, None, dsum, None
        total, weight, rstd = ctx.saved_tensors
        rows, stride = as_rows(total)
        grads, grad_stride = as_rows(dy)
        others, other_stride = (None, 0) if dsum is None else as_rows(dsum)
        width, size = weight.shape[0], total.numel()
        dx = torch.empty_like(total, memory_format=torch.contiguous_format)
        dw = torch.empty_like(weight)
        getattr(_lib, "rms_norm_backward_" + ctx.pair)(
            grads,
            rows,
            weight,
            rstd,
            others,
            dx,
            dw,
            size // width,
            width,
            grad_stride,
            stride,
            other_stride,
            ctx.zero_centered,
            native.threads(size),
        )
        wants_dx, wants_dw, _, _, wants_residual, _ = ctx.needs_input_grad
        return dx if wants_dx else None, dw if wants_dw else None, None, None, dx if wants_residual else None, None
