"""rms_norm and layer_norm in C++ for bf16 and fp32, one pass per direction; the reference for other dtypes.

Strided rows, such as QK-norm heads of one projection, are not copied. Threads have fixed rows and parameter gradients
are added in order: deterministic. (PyTorch sums bf16 weight gradients in bf16: their error grows with the row count.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops import autograd, native
from mindspeed_lite.ops.norm import Case, reference
from mindspeed_lite.ops.rows import as_rows
from mindspeed_lite.ops.traced import is_traced

_lib = native.Library(__file__)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def supported(case: Case) -> list[str]:
    unusable = _lib.unusable() if {case.dtype, case.weight_dtype} <= native.DTYPES else None
    return [] if unusable is None else [unusable]


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    if is_traced(x) or x.numel() == 0 or not {x.dtype, weight.dtype} <= native.DTYPES:
        return reference.norm(x, weight, bias, eps, zero_centered)
    y: Tensor = autograd.apply(_NORM, (x, weight, bias), (eps, zero_centered))
    return y


def _kernel(direction: str, x: Tensor, weight: Tensor, mean: Tensor | None) -> Any:
    return _lib.kernel(f"{'rms' if mean is None else 'layer'}_norm_{direction}", x.dtype, weight.dtype)


def _forward(inputs: Any, options: tuple[float, bool]) -> tuple[Tensor, autograd.Inputs]:
    x, weight, bias = inputs
    rows, stride = as_rows(x)
    width, size = weight.shape[0], x.numel()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = x.new_empty(size // width, dtype=torch.float32)
    mean = None if bias is None else torch.empty_like(rstd)
    weight = weight.contiguous()
    given = (rows, weight, None if bias is None else bias.contiguous(), y, mean, rstd)
    _kernel("forward", x, weight, mean)(*given, size // width, width, stride, *options, native.threads(size))
    return y, (x, weight, mean, rstd)


def _backward(dy: Tensor, saved: Any, options: tuple[float, bool], wanted: Sequence[bool]) -> autograd.Inputs:
    x, weight, mean, rstd = saved
    (rows, stride), (grads, grad_stride) = as_rows(x), as_rows(dy)
    width, size = weight.shape[0], x.numel()
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dw = torch.empty_like(weight)
    db = None if mean is None else torch.empty_like(weight)
    given = (grads, rows, weight, mean, rstd, dx, dw, db, size // width, width, grad_stride, stride)
    _kernel("backward", x, weight, mean)(*given, options[1], native.threads(size))
    return dx, dw, db


_NORM = autograd.Kernel(_forward, _backward)
