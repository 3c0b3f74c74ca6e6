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
        for direction, letters in (("forward", "pppplllfii"), ("backward", "ppppppllllii"))
    },
    returns_status=True,
)


def supported(case: Case) -> list[str]:
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return [f"dtype {case.dtype}"]
    return []


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, zero_centered: bool = False) -> torch.Tensor:
    if is_traced(x) or x.numel() == 0:
        return reference.rms_norm(x, weight, eps, zero_centered)
    pair = _PAIRS.get((x.dtype, weight.dtype))
    if pair is None:
        return blocks.rms_norm(x, weight, eps, zero_centered)
    reason = _lib.unusable()
    if reason is not None:
        report_fallback("rms_norm", "cpu", (reason,), "blocks of rows, by PyTorch")
        return blocks.rms_norm(x, weight, eps, zero_centered)
    y: torch.Tensor = _RMSNorm.apply(x, weight, eps, zero_centered, pair)  # type: ignore[no-untyped-call]
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        zero_centered: bool,
        pair: str,
    ) -> torch.Tensor:
        rows, stride = as_rows(x)
        width, size = weight.shape[0], x.numel()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rstd = x.new_empty(size // width, dtype=torch.float32)
        weight = weight.contiguous()
        getattr(_lib, "rms_norm_forward_" + pair)(
            rows,
            weight,
            y,
            rstd,
            size // width,
            width,
            stride,
            eps,
            zero_centered,
            native.threads(size),
        )
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centered, ctx.pair = zero_centered, pair
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        rows, stride = as_rows(x)
        grads, grad_stride = as_rows(dy)
        width, size = weight.shape[0], x.numel()
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dw = torch.empty_like(weight)
        getattr(_lib, "rms_norm_backward_" + ctx.pair)(
            grads,
            rows,
            weight,
            rstd,
            dx,
            dw,
            size // width,
            width,
            grad_stride,
            stride,
            ctx.zero_centered,
            native.threads(size),
        )
        wants = ctx.needs_input_grad
        return dx if wants[0] else None, dw if wants[1] else None, None, None, None
