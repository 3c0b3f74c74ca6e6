"""rms_norm and layer_norm in Triton: zero-centred weights, mixed dtypes, widths up to 16384.

Memory-bound. Forward a program takes one tile: on an H100 rows of 4096 reach 98 % of a copy's bandwidth, 81 % with a
persistent program that prefetches. Backward sums weight gradients in registers, so programs persist; a loop that
prefetches pays for rows below 4096 only (docs/benchmarks/gpu/h100.md).

Registers are too few for rows above 8192 (backward in 32 bits, or if width or stride is no multiple of 16: 4096):
`SPLITS` programs then share a row, each summing its own columns and reading the others, mostly from L2.
`row_kernels.add_up` sums parts in order: deterministic.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_lite.ops import autograd
from mindspeed_lite.ops.row_kernels import add_up, cdiv, next_power_of_2, on, programs
from mindspeed_lite.ops.rows import as_rows

# Bytes in flight per multiprocessor (B200).
_UNDER_WAY = 43 * 1024


class Plan(NamedTuple):
    """Launch shape of a kernel.

    rows, block: tile. splits: programs per row. warps: threads / 32. stages: tiles in shared memory. resident: programs
    per multiprocessor; 0 for one program per tile.
    """

    rows: int
    block: int
    splits: int
    warps: int
    stages: int = 1
    resident: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Compile options. Without a register limit ptxas may spill for more occupancy than needed."""
        limit = {"maxnreg": 65536 // (32 * self.warps * self.resident)} if self.resident else {}
        return {"num_warps": self.warps, **limit}


@functools.cache
def plan_forward(width: int) -> Plan:
    block: int = min(next_power_of_2(width), 8192)
    rows = max(1, 1024 // block)
    return Plan(rows, block, -(-width // block), max(4, min(8, rows * block // 512)))


@functools.cache
def plan_backward(width: int, itemsize: int, aligned: bool) -> Plan:
    block: int = next_power_of_2(width)
    lanes = 16 if block > 1024 else 8  # elements per thread
    if not aligned:
        lanes //= 2
    if (not aligned and block > 4096) or (itemsize == 4 and block > 2048):
        block, lanes = 4096, 8
    block = min(block, 8192)
    rows = max(1, min(16, 128 * lanes // block))
    warps = max(4, min(32, rows * block // (32 * lanes)))
    resident = max(1, 16 // warps)
    read = 2 * rows * width * itemsize  # bytes per tile
    ahead = -(-_UNDER_WAY // (resident * read)) if aligned and block < 4096 else 0
    return Plan(rows, block, -(-width // block), warps, 1 + ahead, resident)


@triton.jit
def _load_factor(weight, lane, width, always, ZERO_CENTERED: tl.constexpr):
    """fp32 factors, 0 outside; conditional, lest every row prefetches them to shared memory."""
    factor = tl.zeros(lane.shape, dtype=tl.float32)
    if always:
        factor = tl.load(weight + lane, mask=lane < width, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            factor += 1.0
    return factor


@triton.jit
def _load_rows(x, rest, width, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 tile of x, 0 outside of `rest` rows and `width` columns."""
    line = tl.arange(0, ROWS).to(tl.int64)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    inside = (line < rest) & (lane < width)
    return tl.load(x + line * stride + lane, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _merge(count, middle, squares, value, width, BLOCK: tl.constexpr, CENTERED: tl.constexpr):
    """Merges `width` columns into count, mean and sum of squared deviations (from 0 unless CENTERED).

    T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    number = tl.minimum(width, BLOCK).to(tl.float32)
    whole = count + number
    if CENTERED:
        its = tl.sum(value, axis=1) / number
        value = tl.where(tl.arange(0, BLOCK)[None, :] < width, value - its[:, None], 0.0)
        apart = its - middle
        middle += apart * (number / whole)
        squares += apart * apart * (count * number / whole)
    return whole, middle, squares + tl.sum(value * value, axis=1)


@triton.jit
def forward_kernel(
    x, weight, bias, y, mean, rstd, rows, width, x_stride, eps, CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    line = tl.arange(0, ROWS).to(tl.int64)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    begin = tl.program_id(1) * BLOCK  # this program's own columns
    first = tl.program_id(0).to(tl.int64) * ROWS
    xs = x + first * x_stride
    count, middle, squares = 0.0, tl.zeros([ROWS], dtype=tl.float32), tl.zeros([ROWS], dtype=tl.float32)
    for split in tl.static_range(1, SPLITS):
        there = begin + split * BLOCK
        there = tl.where(there < SPLITS * BLOCK, there, there - SPLITS * BLOCK)
        value = _load_rows(xs + there, rows - first, width - there, x_stride, ROWS, BLOCK)
        count, middle, squares = _merge(count, middle, squares, value, width - there, BLOCK, CENTERED)
    value = _load_rows(xs + begin, rows - first, width - begin, x_stride, ROWS, BLOCK)
    count, middle, squares = _merge(count, middle, squares, value, width - begin, BLOCK, CENTERED)
    inside = (line < rows - first) & (lane < width - begin)
    inverse = 1.0 / tl.sqrt(squares / width + eps)
    row = first + tl.arange(0, ROWS)
    alone = (row < rows) & (begin == 0)
    tl.store(rstd + row, inverse, mask=alone)
    if CENTERED:
        tl.store(mean + row, middle, mask=alone)
        value -= middle[:, None]
    out = value * inverse[:, None] * _load_factor(weight + begin, lane, width - begin, rows > 0, ZERO_CENTERED)
    if CENTERED:
        out += _load_factor(bias + begin, lane, width - begin, width > 0, False)
    tl.store(y + first * width + begin + line * width + lane, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _load(
    dy, x, weight, rest, width, dy_stride, x_stride, middle, inverse, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """dy, normalised x and factor of `rest` rows and `width` columns; dy and factor 0 outside."""
    line = tl.arange(0, ROWS).to(tl.int64)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    inside = (line < rest) & (lane < width)
    grad = tl.load(dy + line * dy_stride + lane, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + line * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    scale = _load_factor(weight, lane, width, rest > 0, ZERO_CENTERED)
    return grad, (value - middle[:, None]) * inverse[:, None], scale


@triton.jit
def backward_kernel(
    dy, x, weight, mean, rstd, dx, parts, rows, width, dy_stride, x_stride, CENTERED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    line = tl.arange(0, ROWS).to(tl.int64)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    begin = tl.program_id(1) * BLOCK  # this program's own columns
    share = tl.zeros([ROWS, BLOCK], dtype=tl.float32)  # weight gradient
    plain = tl.zeros([ROWS, BLOCK], dtype=tl.float32)  # bias gradient
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)
        middle = tl.zeros([ROWS], dtype=tl.float32)
        if CENTERED:
            middle = tl.load(mean + row, mask=row < rows, other=0.0)
        dys, xs = dy + first * dy_stride, x + first * x_stride
        slope = tl.zeros([ROWS], dtype=tl.float32)
        offset = tl.zeros([ROWS], dtype=tl.float32)
        for split in tl.static_range(1, SPLITS):
            there = begin + split * BLOCK
            there = tl.where(there < SPLITS * BLOCK, there, there - SPLITS * BLOCK)
            grad, normal, scale = _load(
                dys + there, xs + there, weight + there, rows - first, width - there, dy_stride, x_stride,
                middle, inverse, ROWS, BLOCK, ZERO_CENTERED,
            )  # fmt: skip
            slope += tl.sum(grad * scale * normal, axis=1)
            if CENTERED:
                offset += tl.sum(grad * scale, axis=1)
        grad, normal, scale = _load(
            dys + begin, xs + begin, weight + begin, rows - first, width - begin, dy_stride, x_stride,
            middle, inverse, ROWS, BLOCK, ZERO_CENTERED,
        )  # fmt: skip
        share += grad * normal
        if CENTERED:
            plain += grad
        grad *= scale
        slope = (slope + tl.sum(grad * normal, axis=1)) / width
        out = grad - normal * slope[:, None]
        if CENTERED:
            out -= ((offset + tl.sum(grad, axis=1)) / width)[:, None]
        out *= inverse[:, None]
        inside = (line < rows - first) & (lane < width - begin)
        tl.store(dx + first * width + begin + line * width + lane, out.to(dx.dtype.element_ty), mask=inside)
    lanes = tl.arange(0, BLOCK)
    part = parts + tl.program_id(0) * (2 if CENTERED else 1) * width + begin + lanes
    tl.store(part, tl.sum(share, axis=0), mask=lanes < width - begin)
    if CENTERED:
        tl.store(part + width, tl.sum(plain, axis=0), mask=lanes < width - begin)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """Differentiable layer_norm, or rms_norm where bias is None."""
    y: Tensor = autograd.apply(_NORM, (x, weight, bias), (eps, zero_centered))
    return y


def _forward(inputs: Any, options: tuple[float, bool]) -> tuple[Tensor, autograd.Inputs]:
    (x, weight, bias), (eps, zero_centered) = inputs, options
    width = weight.shape[0]
    count = x.numel() // width
    rows, stride = as_rows(x)
    weight = weight.contiguous()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = torch.empty(count, dtype=torch.float32, device=x.device)
    mean = None if bias is None else torch.empty_like(rstd)
    shape = plan_forward(width)
    with on(x):
        forward_kernel[(cdiv(count, shape.rows), shape.splits)](
            rows, weight, None if bias is None else bias.contiguous(), y, mean, rstd, count, width, stride, eps,
            bias is not None, zero_centered, shape.rows, shape.block, shape.splits, **shape.options,
        )  # fmt: skip
    return y, (x, weight, mean, rstd)


def _backward(dy: Tensor, saved: Any, options: tuple[float, bool], wanted: Sequence[bool]) -> autograd.Inputs:
    x, weight, mean, rstd = saved
    width, count = weight.shape[0], rstd.shape[0]
    rows, stride = as_rows(x)
    grads, grad_stride = as_rows(dy)
    shape = plan_backward(width, x.element_size(), _is_aligned(width, stride, grad_stride))
    size = programs(x.device, shape.resident, cdiv(count, shape.rows), shape.splits)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    sums = width if mean is None else 2 * width
    parts = torch.empty(size, sums, dtype=torch.float32, device=x.device)
    both = weight.new_empty(sums)
    with on(x):
        backward_kernel[(size, shape.splits)](
            grads, rows, weight, mean, rstd, dx, parts, count, width, grad_stride, stride, mean is not None,
            options[1], shape.rows, shape.block, shape.splits, shape.stages, **shape.options,
        )  # fmt: skip
        add_up(parts, both)
    return dx, both[:width], both[width:]


_NORM = autograd.Kernel(_forward, _backward)


def _is_aligned(*numbers: int) -> bool:
    """Whether Triton can use 16-byte vector loads."""
    return all(number % 16 == 0 for number in numbers)
