"""Triton kernel of adamw: one program per block of each tensor."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from mindspeed_lite.ops.adamw import kernel_moments as moments
from mindspeed_lite.ops.adamw.kernel_moments import pointer


@triton.jit(do_not_specialize=["seed"])
def step(
    addresses,  # int64 [T, 8]
    pieces,  # int32 [gridDim, 2]
    scale_tensor,  # fp32 [1] or None
    scale,
    keep,
    l2,
    beta1_rest,
    beta2,
    beta2_rest,
    rate,
    root,
    eps,
    seed,
    GRAD: tl.constexpr,
    OUT: tl.constexpr,
    HALVES: tl.constexpr,
    MOMENTS: tl.constexpr,
    L2: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece = tl.program_id(0)
    row = addresses + tl.load(pieces + 2 * piece) * 8
    start = tl.load(pieces + 2 * piece + 1).to(tl.int64) * BLOCK
    left = tl.load(row + 7) - start
    if scale_tensor is not None:
        scale = scale * tl.load(scale_tensor).to(tl.float32)
    rule = (scale, keep, l2, beta1_rest, beta2, beta2_rest, rate, root, eps, seed)
    # Only a tensor's last block is masked: a size unknown to the compiler would prevent vector accesses.
    if left >= BLOCK:
        _update(row, start, left, rule, GRAD, OUT, HALVES, MOMENTS, L2, False, ALIGNED, BLOCK)
    else:
        _update(row, start, left, rule, GRAD, OUT, HALVES, MOMENTS, L2, True, ALIGNED, BLOCK)


@triton.jit
def _update(
    row,
    start,
    left,
    rule,
    GRAD: tl.constexpr,
    OUT: tl.constexpr,
    HALVES: tl.constexpr,
    MOMENTS: tl.constexpr,
    L2: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale, keep, l2, beta1_rest, beta2, beta2_rest, rate, root, eps, seed = rule
    at = tl.arange(0, BLOCK)
    mask = at < left if MASKED else None
    param_at = pointer(row, 0, "int16" if HALVES else "fp32", start, ALIGNED) + at
    grad_at = pointer(row, 1, GRAD, start, ALIGNED) + at
    g = tl.load(grad_at, mask=mask).to(tl.float32) * scale
    m, v = moments.load(row, start, left, mask, MOMENTS, ALIGNED, BLOCK)
    if HALVES:
        high_at = pointer(row, 4, "int16", start, ALIGNED) + at
        sign = v.to(tl.uint32, bitcast=True) >> 31
        p = _join(tl.load(high_at, mask=mask), tl.load(param_at, mask=mask), sign)
        v = tl.abs(v)
    else:
        p = tl.load(param_at, mask=mask)
    if L2:
        g = g + l2 * p
    else:
        p = p * keep
    m = m + beta1_rest * (g - m)
    v = beta2 * v + beta2_rest * g * g
    # Correctly rounded division and root are free in a memory-bound kernel; parameter errors accumulate.
    p = p - rate * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    if HALVES:
        high, low, bit = _split(p)
        tl.store(high_at, high, mask=mask)
        tl.store(param_at, low, mask=mask)
        bits = (v.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) | (bit << 31)
        v = bits.to(tl.float32, bitcast=True)
    else:
        tl.store(param_at, p, mask=mask)
    moments.store(row, m, v, start, left, mask, seed, MOMENTS, MASKED, ALIGNED, BLOCK)
    if OUT is not None:
        tl.store(pointer(row, 4, OUT, start, ALIGNED) + at, p.to(tl.dtype(OUT)), mask=mask)


@triton.jit
def _join(high, low, bit):
    # The codec of halves.py, for non-negative values.
    high = high.to(tl.uint16, bitcast=True).to(tl.uint32)
    low = low.to(tl.uint16, bitcast=True).to(tl.uint32)
    return ((((high + bit) << 16) | low) - 0x8000).to(tl.float32, bitcast=True)


@triton.jit
def _split(p):
    bits = p.to(tl.uint32, bitcast=True)
    away = bits + 0x8000
    low = away & 0xFFFF
    bit = ((low == 0).to(tl.uint32) & (away >> 16)) | ((away ^ bits) >> 31)
    return _as_int16((away >> 16) - bit), _as_int16(low), bit


@triton.jit
def _as_int16(number):
    return number.to(tl.uint16).to(tl.int16, bitcast=True)
