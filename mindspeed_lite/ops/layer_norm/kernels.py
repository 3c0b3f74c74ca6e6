"""layer_norm in Triton: with zero-centred weights, mixed dtypes, a residual, and rows too short for a block each.

A program holds a tile of whole rows in registers and reads it once. The gradients of weight and bias are summed in two
stages: each program over a fixed set of rows, then over programs in order; there are no atomics, so results repeat.
"""

# A kernel's parameters have no types in Python.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops.row_kernels import launch, on, programs, total_kernel
from mindspeed_lite.ops.rows import as_rows


@triton.jit
def forward_kernel(
    x, residual, weight, bias, y, total, mean, rstd, rows, width, x_stride, residual_stride, eps,
    ZERO_CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    at = row[:, None] * width + column[None, :]
    if RESIDUAL:
        value += tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        # What is normalised is the sum as it is handed on.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    middle = tl.sum(value, axis=1) / width
    value = tl.where(inside, value - middle[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / width + eps)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    shift = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    out = value * inverse[:, None] * scale[None, :] + shift[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
    tl.store(mean + row, middle, mask=row < rows)
    tl.store(rstd + row, inverse, mask=row < rows)


@triton.jit
def backward_kernel(
    dy, x, weight, mean, rstd, dsum, dx, parts, rows, width, dy_stride, x_stride, dsum_stride,
    ZERO_CENTERED: tl.constexpr, DSUM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    share = tl.zeros([ROWS, BLOCK], dtype=tl.float32)  # of the weight's gradient
    plain = tl.zeros([ROWS, BLOCK], dtype=tl.float32)  # of the bias's
    tile = tl.program_id(0)
    while tile * ROWS < rows:
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < width)
        grad = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        middle = tl.load(mean + row, mask=row < rows, other=0.0)
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)
        # Read again for each tile: from the nearest cache, and without a register for every number meanwhile.
        scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            scale += 1.0
        normal = (value - middle[:, None]) * inverse[:, None]
        # Outside the row grad and scale are zero, so nothing of these sums comes from there.
        share += grad * normal
        plain += grad
        grad = grad * scale[None, :]
        slope = tl.sum(grad * normal, axis=1) / width
        offset = tl.sum(grad, axis=1) / width
        out = (grad - offset[:, None] - normal * slope[:, None]) * inverse[:, None]
        if DSUM:
            out += tl.load(dsum + row[:, None] * dsum_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row[:, None] * width + column[None, :], out.to(dx.dtype.element_ty), mask=inside)
        tile += tl.num_programs(0)
    part = parts + tl.program_id(0) * 2 * width + column
    tl.store(part, tl.sum(share, axis=0), mask=column < width)
    tl.store(part + width, tl.sum(plain, axis=0), mask=column < width)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        zero_centered: bool,
        residual: torch.Tensor | None,
    ) -> Any:
        width = weight.shape[0]
        count = x.numel() // width
        rows, stride = as_rows(x)
        others, other_stride = (rows, 0) if residual is None else as_rows(residual)
        weight, bias = weight.contiguous(), bias.contiguous()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        total = x if residual is None else torch.empty_like(y)
        mean = torch.empty(count, dtype=torch.float32, device=x.device)
        rstd = torch.empty_like(mean)
        tile = launch(width)
        with on(x):
            forward_kernel[(triton.cdiv(count, tile.rows),)](
                rows, others, weight, bias, y, y if residual is None else total, mean, rstd, count, width, stride,
                other_stride, eps, zero_centered, residual is not None, tile.rows, tile.block, num_warps=tile.warps,
            )  # fmt: skip
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.zero_centered = zero_centered
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None = None) -> Any:
        if dy is None:
            return dsum, None, None, None, None, dsum
        total, weight, mean, rstd = ctx.saved_tensors
        width, count = weight.shape[0], rstd.shape[0]
        rows, stride = as_rows(total)
        grads, grad_stride = as_rows(dy)
        others, other_stride = (grads, 0) if dsum is None else as_rows(dsum)
        tile = launch(width)
        size = min(programs(total.device), triton.cdiv(count, tile.rows))
        dx = torch.empty_like(total, memory_format=torch.contiguous_format)
        parts = torch.empty(size, 2 * width, dtype=torch.float32, device=total.device)
        both = weight.new_empty(2 * width)
        with on(total):
            backward_kernel[(size,)](
                grads, rows, weight, mean, rstd, others, dx, parts, count, width, grad_stride, stride, other_stride,
                ctx.zero_centered, dsum is not None, tile.rows, tile.block, num_warps=tile.warps,
            )  # fmt: skip
            total_kernel[(triton.cdiv(2 * width, 64),)](parts, both, size, 2 * width, 64)
        wants = ctx.needs_input_grad
        return (
            dx if wants[0] else None,
            both[:width] if wants[1] else None,
            both[width:] if wants[2] else None,
            None,
            None,
            dx if wants[5] else None,
        )
