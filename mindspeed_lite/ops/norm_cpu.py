"""rms_norm and layer_norm in C++ (`native/norms.cpp`) for bf16 and fp32, one pass per direction.

Strided rows, such as QK-norm heads of one projection, are not copied. Threads have fixed rows and parameter gradients
are added in order: deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops import autograd, native
from mindspeed_lite.ops.rows import as_rows
from mindspeed_lite.ops.traced import is_traced

_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_PAIRS = {(x, weight): f"{_NAMES[x]}_{_NAMES[weight]}" for x in _NAMES for weight in _NAMES}

_lib = native.Library(
    Path(native.__file__).with_name("norms.cpp"),
    {f"norm_forward_{pair}": "pppppplllfii" for pair in _PAIRS.values()}
    | {f"norm_backward_{pair}": "ppppppppllllii" for pair in _PAIRS.values()},
    returns_status=True,
)


def reasons(dtype: torch.dtype, weight_dtype: torch.dtype) -> list[str]:
    """Why neither the kernel nor the reference in its place serves these dtypes."""
    if not dtype.is_floating_point:
        return [f"dtype {dtype}"]
    unusable = _lib.unusable() if (dtype, weight_dtype) in _PAIRS else None
    return [] if unusable is None else [unusable]


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes the call; the reference takes others."""
    return not is_traced(x) and x.numel() > 0 and (x.dtype, weight.dtype) in _PAIRS


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """Differentiable layer_norm, or rms_norm without bias; x is not empty."""
    y: Tensor = autograd.apply(_NORM, (x, weight, bias), (eps, zero_centered))
    return y


def _forward(inputs: Any, options: tuple[float, bool]) -> tuple[Tensor, autograd.Inputs]:
    x, weight, bias = inputs
    rows, stride = as_rows(x)
    width, size = weight.shape[0], x.numel()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = x.new_empty(size // width, dtype=torch.float32)
    mean = None if bias is None else torch.empty_like(rstd)
    weight = weight.contiguous()
    given = (rows, weight, None if bias is None else bias.contiguous(), y, mean, rstd)
    kernel = getattr(_lib, "norm_forward_" + _PAIRS[x.dtype, weight.dtype])
    kernel(*given, size // width, width, stride, *options, native.threads(size))
    return y, (x, weight, mean, rstd)


def _backward(dy: Tensor, saved: Any, options: tuple[float, bool], wanted: Sequence[bool]) -> autograd.Inputs:
    x, weight, mean, rstd = saved
    (rows, stride), (grads, grad_stride) = as_rows(x), as_rows(dy)
    width, size = weight.shape[0], x.numel()
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dw = torch.empty_like(weight)
    db = None if mean is None else torch.empty_like(weight)
    given = (grads, rows, weight, mean, rstd, dx, dw, db, size // width, width, grad_stride, stride)
    kernel = getattr(_lib, "norm_backward_" + _PAIRS[x.dtype, weight.dtype])
    kernel(*given, options[1], native.threads(size))
    return dx, dw, db


_NORM = autograd.Kernel(_forward, _backward)
