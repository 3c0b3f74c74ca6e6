"""activation on CPU: one pass over memory in each direction, in C++."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_lite.ops import native
from mindspeed_lite.ops.activation import autograd, recompute, reference
from mindspeed_lite.ops.traced import is_traced

if TYPE_CHECKING:
    from mindspeed_lite.ops.activation import Case

_FORWARD, _BACKWARD = "ipppplllffi", "ipppppppllllffi"
_lib = native.Library(
    Path(__file__).with_name("cpu.cpp"),
    {
        "activation_forward_bf16": _FORWARD,
        "activation_forward_fp32": _FORWARD,
        "activation_backward_bf16": _BACKWARD,
        "activation_backward_fp32": _BACKWARD,
    },
)

# The order in which cpu.cpp numbers the kinds.
_NUMBER = {kind: number for number, kind in enumerate((*reference.GATED, *reference.PLAIN))}

# Rows are divided into at most so many blocks for the sums over rows, each with a row of fp32 sums of its own.
_BLOCKS = 64


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype not in (torch.bfloat16, torch.float32):
        reasons.append(f"dtype {case.dtype}: the kernel takes bfloat16 and float32")
    if torch.float64 in (case.bias_dtype, case.weights_dtype):
        reasons.append("bias or weights in float64, which the kernel would round to float32")
    unusable = None if reasons else _lib.unusable()
    return reasons if unusable is None else [unusable]


def activation(
    x: torch.Tensor,
    kind: str,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    linear_offset: float = 0.0,
    clamp: float | None = None,
) -> torch.Tensor:
    if is_traced(x):
        # A compiler fuses the definition itself, and what has no memory cannot be handed to a kernel.
        return recompute.activation(x, kind, bias, weights, linear_offset, clamp)
    return autograd.run(_PASS, x, bias, weights, autograd.Form(kind, linear_offset, clamp))


def _forward(
    x: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor | None, form: autograd.Form
) -> torch.Tensor:
    rows = autograd.rows(x)
    half = rows.width // 2 if form.kind in reference.GATED else rows.width
    y = torch.empty((*x.shape[:-1], half), dtype=x.dtype, device=x.device)
    bias, weights = _fp32(bias), _fp32(weights)
    function = _lib.activation_forward_bf16 if x.dtype is torch.bfloat16 else _lib.activation_forward_fp32
    function(
        _NUMBER[form.kind],
        rows.data,
        bias,
        weights,
        y,
        rows.number,
        rows.width,
        rows.stride,
        form.linear_offset,
        math.inf if form.clamp is None else form.clamp,
        native.threads(x.numel()),
    )
    return y


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    form: autograd.Form,
    wanted: tuple[bool, bool, bool],
) -> autograd.Gradients:
    rows = autograd.rows(x)
    blocks = max(1, min(rows.number, _BLOCKS))
    dy = dy.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dbias = torch.empty(blocks, rows.width, dtype=torch.float32, device=x.device) if wanted[1] else None
    dweights = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device) if wanted[2] else None
    wide_bias, wide_weights = _fp32(bias), _fp32(weights)
    function = _lib.activation_backward_bf16 if x.dtype is torch.bfloat16 else _lib.activation_backward_fp32
    function(
        _NUMBER[form.kind],
        dy,
        rows.data,
        wide_bias,
        wide_weights,
        dx,
        dbias,
        dweights,
        rows.number,
        blocks,
        rows.width,
        rows.stride,
        form.linear_offset,
        math.inf if form.clamp is None else form.clamp,
        native.threads(x.numel()),
    )
    return (
        dx if wanted[0] else None,
        dbias.sum(0).to(bias.dtype) if dbias is not None and bias is not None else None,
        dweights.to(weights.dtype) if dweights is not None and weights is not None else None,
    )


_PASS = autograd.Pass(_forward, _backward)


def _fp32(t: torch.Tensor | None) -> Any:
    return None if t is None else t.detach().to(torch.float32).contiguous()
