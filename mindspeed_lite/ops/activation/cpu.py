"""activation on CPU: biased GELU in C++, one pass over memory per direction; others in PyTorch.

Both passes of biased GELU [4096, 16384] in bf16 take 56 ms, PyTorch and torch.compile 155 ms. A SwiGLU kernel was not
faster than torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops import autograd, native
from mindspeed_lite.ops.activation import Case, reference
from mindspeed_lite.ops.activation.reference import ActivationSpec
from mindspeed_lite.ops.rows import as_rows

_lib = native.Library(__file__)
# Blocks of rows, each with an fp32 row of bias gradients.
_BLOCKS = 64


def supported(case: Case) -> list[str]:
    has_kernel = case.kind == "gelu" and case.bias_dtype not in (None, torch.float64) and case.dtype in native.DTYPES
    unusable = _lib.unusable() if has_kernel else None
    return [] if unusable is None else [unusable]


def activation(x: Tensor, bias: Tensor | None, weights: Tensor | None, spec: ActivationSpec) -> Tensor:
    has_kernel = spec.kind == "gelu" and bias is not None and bias.dtype != torch.float64 and weights is None
    if not has_kernel or x.dtype not in native.DTYPES or x.numel() == 0:
        return reference.activation(x, bias, weights, spec)
    y: Tensor = autograd.apply(_GELU, (x, bias))
    return y


def _forward(inputs: Any, _: None) -> tuple[Tensor, autograd.Inputs]:
    x, bias = inputs
    rows, stride = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype)
    width = x.shape[-1]
    kernel = _lib.kernel("forward", x.dtype)
    kernel(rows, _fp32(bias), y, x.numel() // width, width, stride, native.threads(x.numel()))
    return y, inputs


def _backward(dy: Tensor, saved: Any, _: None, wanted: Sequence[bool]) -> autograd.Inputs:
    x, bias = saved
    rows, stride = as_rows(x)
    width = x.shape[-1]
    number = x.numel() // width
    blocks = min(number, _BLOCKS)
    dx = torch.empty(x.shape, dtype=x.dtype)
    dbias = torch.zeros(blocks, width) if wanted[1] else None
    kernel = _lib.kernel("backward", x.dtype)
    kernel(
        dy.contiguous(), rows, _fp32(bias), dx, dbias, number, blocks, width, stride, native.threads(x.numel())
    )  # fmt: skip
    return dx, None if dbias is None else dbias.sum(0).to(bias.dtype)


_GELU = autograd.Kernel(_forward, _backward)


def _fp32(bias: Tensor) -> Tensor:
    return bias.detach().to(torch.float32).contiguous()
