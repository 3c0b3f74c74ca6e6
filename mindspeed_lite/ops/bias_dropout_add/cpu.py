"""bias_dropout_add on CPU in C++: one pass over memory in each direction.

A hash of seed and position replaces a stored mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops import autograd, native
from mindspeed_lite.ops.bias_dropout_add import Case

LIBRARY = native.Library(__file__)
DTYPES = native.DTYPES

# Maximum number of row blocks with own fp32 bias gradient sums.
_BLOCKS = 64


def supported(case: Case) -> list[str]:
    return ["bias in float64, which the kernel would round to float32"] if case.bias_dtype == torch.float64 else []


def bias_dropout_add(x: Tensor, residual: Tensor, bias: Tensor | None, dropout_p: float) -> Tensor:
    if bias is None and dropout_p == 0.0:
        return residual + x
    if dropout_p == 1.0:
        return residual + (x if bias is None else x + bias.to(x.dtype).reshape(-1)) * 0.0
    dropped = min(round(dropout_p * 2**32), 2**32 - 1)
    draws = (dropped, int(torch.randint(1 << 62, ())) if dropped else 0)
    like = None if bias is None else (bias.shape, bias.dtype)
    y: Tensor = autograd.apply(_KERNEL, (x, residual, bias), (draws, like))
    return y


def _forward(inputs: Any, options: Any) -> tuple[Tensor, autograd.Inputs]:
    (x, residual, bias), (draws, _) = inputs, options
    x, residual, width = x.contiguous(), residual.contiguous(), x.shape[-1]
    wide = torch.zeros(width) if bias is None else bias.reshape(-1).to(torch.float32).contiguous()
    y = torch.empty_like(residual)
    rows = x.numel() // width if width else 0
    kernel = LIBRARY.kernel("forward_dropout" if draws[0] else "forward", x.dtype)
    kernel(x, wide, residual, y, rows, width, *draws, _scale(draws), native.threads(x.numel()))
    return y, ()


def _backward(dy: Tensor, saved: Any, options: Any, wanted: Sequence[bool]) -> autograd.Inputs:
    draws, like = options
    # Without dropout dx equals dy.
    is_same = not draws[0]
    if (is_same and not wanted[2]) or not (wanted[0] or wanted[2]):
        return dy, dy, None
    dy = dy.contiguous()
    width = dy.shape[-1]
    rows = dy.numel() // width if width else 0
    dx = dy if is_same else torch.empty_like(dy)
    blocks = min(_BLOCKS, max(rows, 1))
    sums = torch.zeros(blocks, width) if wanted[2] else None
    kernel = LIBRARY.kernel("backward" if is_same else "backward_dropout", dy.dtype)
    given = (dy, None if is_same else dx, sums, rows, blocks, width)
    kernel(*given, *draws, _scale(draws), native.threads(dy.numel()))
    return dx, dy, None if sums is None else sums.sum(0).to(like[1]).view(like[0])


_KERNEL = autograd.Kernel(_forward, _backward)


def _scale(draws: tuple[int, int]) -> float:
    return 1.0 / (1.0 - draws[0] * 2.0**-32)
