"""layer_norm on CPU: a compiled kernel for bf16 and fp32, PyTorch's own where there is none.

PyTorch's kernel adds the gradients of weight and bias up in bf16 for a bf16 x, so that their error grows with the
number of rows. This one (`cpu.cpp`) adds in fp32, brings a row from memory once forward and once backward, and takes
rows at any regular distance without a copy. Results do not depend on which thread is faster: each has a fixed share of
the rows, and the shares of the gradients are added in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops import native
from mindspeed_lite.ops.dispatch import report_fallback
from mindspeed_lite.ops.layer_norm import reference
from mindspeed_lite.ops.rows import as_rows
from mindspeed_lite.ops.traced import is_traced

if TYPE_CHECKING:
    from mindspeed_lite.ops.layer_norm import Case

_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_PAIRS = {(x, weight): f"{_NAMES[x]}_{_NAMES[weight]}" for x in _NAMES for weight in _NAMES}

_lib = native.Library(
    Path(__file__).with_name("cpu.cpp"),
    {
        f"layer_norm_{direction}_{pair}": letters
        for pair in _PAIRS.values()
        for direction, letters in (("forward", "ppppppppllllfii"), ("backward", "ppppppppplllllii"))
    },
    returns_status=True,
)


def supported(case: Case) -> list[str]:
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return [f"dtype {case.dtype}"]
    return []


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-5,
    zero_centered: bool = False,
    residual: torch.Tensor | None = None,
) -> Any:
    if is_traced(x) or x.numel() == 0:
        return reference.layer_norm(x, weight, bias, eps, zero_centered, residual)
    pair = _PAIRS.get((x.dtype, weight.dtype))
    if pair is None:
        return _torchs(x, weight, bias, eps, zero_centered, residual)
    reason = _lib.unusable()
    if reason is not None:
        report_fallback("layer_norm", "cpu", (reason,), "PyTorch's own kernel")
        return _torchs(x, weight, bias, eps, zero_centered, residual)
    return _LayerNorm.apply(x, weight, bias, eps, zero_centered, residual, pair)  # type: ignore[no-untyped-call]


def _torchs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    zero_centered: bool,
    residual: torch.Tensor | None,
) -> Any:
    """By a kernel that takes weights of x's dtype, and fp32 ones beside a 16-bit x."""
    if zero_centered or weight.dtype != x.dtype:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight, bias = weight.to(wide), bias.to(wide)
    total = x if residual is None else x + residual
    y = torch.nn.functional.layer_norm(total, weight.shape, weight + 1 if zero_centered else weight, bias, eps)
    return y if residual is None else (y, total)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        zero_centered: bool,
        residual: torch.Tensor | None,
        pair: str,
    ) -> Any:
        rows, stride = as_rows(x)
        width, size = weight.shape[0], x.numel()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        mean = x.new_empty(size // width, dtype=torch.float32)
        rstd = torch.empty_like(mean)
        weight, bias = weight.contiguous(), bias.contiguous()
        total, others, other_stride = x, None, 0
        if residual is not None:
            others, other_stride = as_rows(residual)
            total = torch.empty_like(y)
            ctx.set_materialize_grads(False)
        getattr(_lib, "layer_norm_forward_" + pair)(
            rows,
            others,
            weight,
            bias,
            y,
            None if others is None else total,
            mean,
            rstd,
            size // width,
            width,
            stride,
            other_stride,
            eps,
            zero_centered,
            native.threads(size),
        )
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.zero_centered, ctx.pair = zero_centered, pair
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None = None) -> Any:
        if dy is None:
            return dsum, None, None, None, None, dsum, None
        total, weight, mean, rstd = ctx.saved_tensors
        rows, stride = as_rows(total)
        grads, grad_stride = as_rows(dy)
        others, other_stride = (None, 0) if dsum is None else as_rows(dsum)
        width, size = weight.shape[0], total.numel()
        dx = torch.empty_like(total, memory_format=torch.contiguous_format)
        dw, db = torch.empty_like(weight), torch.empty_like(weight)
        getattr(_lib, "layer_norm_backward_" + ctx.pair)(
            grads,
            rows,
            weight,
            mean,
            rstd,
            others,
            dx,
            dw,
            db,
            size // width,
            width,
            grad_stride,
            stride,
            other_stride,
            ctx.zero_centered,
            native.threads(size),
        )
        wants = ctx.needs_input_grad
        return (
            dx if wants[0] else None,
            dw if wants[1] else None,
            db if wants[2] else None,
            None,
            None,
            dx if wants[5] else None,
            None,
        )
