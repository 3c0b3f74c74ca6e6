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
        for direction, letters in (("forward", "pppppplllfii"), ("backward", "ppppppppllllii"))
    },
    returns_status=True,
)


def supported(case: Case) -> list[str]:
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return [f"dtype {case.dtype}"]
    return []


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5, zero_centered: bool = False
) -> torch.Tensor:
    if is_traced(x) or x.numel() == 0:
        return reference.layer_norm(x, weight, bias, eps, zero_centered)
    pair = _PAIRS.get((x.dtype, weight.dtype))
    if pair is None:
        return _torchs(x, weight, bias, eps, zero_centered)
    reason = _lib.unusable()
    if reason is not None:
        report_fallback("layer_norm", "cpu", (reason,), "PyTorch's own kernel")
        return _torchs(x, weight, bias, eps, zero_centered)
    y: torch.Tensor = _LayerNorm.apply(x, weight, bias, eps, zero_centered, pair)  # type: ignore[no-untyped-call]
    return y


def _torchs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, zero_centered: bool) -> torch.Tensor:
    """By a kernel that takes weights of x's dtype, and fp32 ones beside a 16-bit x."""
    if zero_centered or weight.dtype != x.dtype:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight, bias = weight.to(wide), bias.to(wide)
    return torch.nn.functional.layer_norm(x, weight.shape, weight + 1 if zero_centered else weight, bias, eps)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        zero_centered: bool,
        pair: str,
    ) -> torch.Tensor:
        rows, stride = as_rows(x)
        width, size = weight.shape[0], x.numel()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        mean = x.new_empty(size // width, dtype=torch.float32)
        rstd = torch.empty_like(mean)
        weight, bias = weight.contiguous(), bias.contiguous()
        getattr(_lib, "layer_norm_forward_" + pair)(
            rows,
            weight,
            bias,
            y,
            mean,
            rstd,
            size // width,
            width,
            stride,
            eps,
            zero_centered,
            native.threads(size),
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.zero_centered, ctx.pair = zero_centered, pair
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        rows, stride = as_rows(x)
        grads, grad_stride = as_rows(dy)
        width, size = weight.shape[0], x.numel()
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dw, db = torch.empty_like(weight), torch.empty_like(weight)
        getattr(_lib, "layer_norm_backward_" + ctx.pair)(
            grads,
            rows,
            weight,
            mean,
            rstd,
            dx,
            dw,
            db,
            size // width,
            width,
            grad_stride,
            stride,
            ctx.zero_centered,
            native.threads(size),
        )
        wants = ctx.needs_input_grad
        return dx if wants[0] else None, dw if wants[1] else None, db if wants[2] else None, None, None, None
