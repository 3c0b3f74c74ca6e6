"""cross_entropy on CUDA: Triton kernels, forward with an online softmax per row."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_lite.ops.row_kernels import cdiv, on

# 8 KiB of bf16: two 16-byte vectors per thread.
BLOCK = 4096
WARPS = 8
LOG2_E = tl.constexpr(math.log2(math.e))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def statistics_kernel(logits_ptr, target_ptr, out_ptr, rows, start, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # rows * columns exceeds 2^31
    row_ptr = logits_ptr + row * WIDTH
    # A line is one vector load of one thread, reduced without communication; threads merge once, after the loop.
    VECTOR: tl.constexpr = min(WIDTH & -WIDTH, BLOCK, 128 // logits_ptr.dtype.element_ty.primitive_bitwidth)
    LINES: tl.constexpr = BLOCK // VECTOR
    columns = tl.arange(0, LINES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    top = tl.full((LINES,), float("-inf"), tl.float32)
    sums = tl.zeros((LINES,), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        inside = first + columns < WIDTH
        x = tl.load(row_ptr + first + columns, mask=inside, other=float("-inf")).to(tl.float32)
        # A NaN need not reach the maximum: the sum has it.
        higher = tl.maximum(top, tl.max(x, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp2((top - base) * LOG2_E) + tl.sum(tl.exp2((x - base[:, None]) * LOG2_E), axis=1)
        top = higher
    highest = tl.max(top, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(out_ptr + row, highest)
    total = tl.sum(sums * tl.exp2((top - base) * LOG2_E), axis=0)
    tl.store(out_ptr + rows + row, total)
    column = tl.load(target_ptr + row) - start
    here = (column >= 0) & (column < WIDTH)
    picked = tl.load(row_ptr + column, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + 2 * rows + row, picked)


@triton.jit
def gradient_kernel(logits_ptr, target_ptr, top_ptr, sums_ptr, dloss_ptr, out_ptr, width, start, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    column = tl.load(target_ptr + row) - start
    x = tl.load(logits_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    dx = tl.exp(x - tl.load(top_ptr + row)) * (1.0 / tl.load(sums_ptr + row))
    dx = (dx - tl.where(columns == column, 1.0, 0.0)) * tl.load(dloss_ptr + row)
    tl.store(out_ptr + row * width + columns, dx.to(out_ptr.dtype.element_ty), mask=inside)


def statistics(rows: Tensor, target: Tensor, start: int) -> Tensor:
    count, width = rows.shape
    out = torch.empty(3, count, dtype=torch.float32, device=rows.device)
    if count:
        with on(rows):
            given = (rows, target, out, count, start, width, _block(width))
            statistics_kernel[(count,)](*given, num_warps=WARPS)
    return out


def gradient(rows: Tensor, target: Tensor, start: int, statistics: Tensor, dloss: Tensor, out: Tensor) -> None:
    count, width = rows.shape
    if count:
        block = _block(width)
        given = (rows, target, *statistics, dloss, out)
        with on(rows):
            gradient_kernel[(count, cdiv(width, block))](*given, width, start, block, num_warps=WARPS)


def _block(width: int) -> int:
    return min(BLOCK, 1 << (width - 1).bit_length())
