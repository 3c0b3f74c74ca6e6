"""bias_dropout_add on CPU: one pass over memory in each direction, in C++.

What PyTorch's dropout costs on CPU is its draws and the mask it keeps; compiled it draws more slowly still. Here an
element's draw is a few integer operations on its position, and is made again in the backward pass: a seed from the
default generator is all that is kept. The sum is rounded once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops import native
from mindspeed_lite.ops.bias_dropout_add import reference
from mindspeed_lite.ops.traced import is_traced

if TYPE_CHECKING:
    from mindspeed_lite.ops.bias_dropout_add import Case

_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_lib = native.Library(
    Path(__file__).with_name("cpu.cpp"),
    {
        **{f"forward_{name}": "ppppllllfi" for name in _NAMES.values()},
        **{f"backward_{name}": "ppplllllfi" for name in _NAMES.values()},
    },
)

# Rows are divided into at most so many blocks for the sum over rows, each with a row of fp32 sums of its own.
_BLOCKS = 64


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype not in _NAMES:
        reasons.append(f"dtype {case.dtype}: the kernel takes bfloat16 and float32")
    if case.bias_dtype == torch.float64:
        reasons.append("bias in float64, which the kernel would round to float32")
    unusable = None if reasons else _lib.unusable()
    return reasons if unusable is None else [unusable]


def bias_dropout_add(
    x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, dropout_p: float
) -> torch.Tensor:
    if is_traced(x) or is_traced(residual):
        return reference.bias_dropout_add(x, residual, bias, dropout_p)
    if bias is None and dropout_p == 0.0:
        return residual + x
    if dropout_p == 1.0:
        # Nothing is left to be scaled.
        return residual + (x if bias is None else x + bias.to(x.dtype).reshape(-1)) * 0.0
    seed = int(torch.randint(1 << 62, ())) if dropout_p else 0
    return _BiasDropoutAdd.apply(x, residual, bias, (min(round(dropout_p * 2**32), 2**32 - 1), seed))  # type: ignore[no-any-return,no-untyped-call]


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, draws: tuple[int, int]
    ) -> torch.Tensor:
        ctx.draws = draws
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        x, residual = x.contiguous(), residual.contiguous()
        wide = None if bias is None else bias.reshape(-1).to(torch.float32).contiguous()
        y = torch.empty_like(residual)
        width = x.shape[-1]
        getattr(_lib, f"forward_{_NAMES[x.dtype]}")(
            x,
            wide,
            residual,
            y,
            x.numel() // width if width else 0,
            width,
            *draws,
            _scale(draws),
            native.threads(x.numel()),
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        draws, wants_bias = ctx.draws, ctx.bias is not None and ctx.needs_input_grad[2]
        if not (ctx.needs_input_grad[0] or wants_bias):
            return None, dy, None, None
        # Without dropout the gradient of x is that of the sum.
        is_same = not draws[0]
        if is_same and not wants_bias:
            return dy, dy, None, None
        dy = dy.contiguous()
        width = dy.shape[-1]
        rows = dy.numel() // width if width else 0
        dx = dy if is_same else torch.empty_like(dy)
        blocks = min(_BLOCKS, max(rows, 1))
        sums = torch.zeros(blocks, width) if wants_bias else None
        getattr(_lib, f"backward_{_NAMES[dy.dtype]}")(
            dy,
            0 if is_same else dx,
            sums,
            rows,
            blocks,
            width,
            *draws,
            _scale(draws),
            native.threads(dy.numel()),
        )
        dbias = None
        if sums is not None:
            shape, dtype = ctx.bias
            dbias = sums.sum(0).to(dtype).view(shape)
        return dx, dy, dbias, None


def _scale(draws: tuple[int, int]) -> float:
    return 1.0 / (1.0 - draws[0] * 2.0**-32)
