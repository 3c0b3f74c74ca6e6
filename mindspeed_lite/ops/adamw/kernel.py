"""Triton kernel of adamw: one program per block of each tensor."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from mindspeed_lite.ops.adamw.moments import BLOCK

_BLOCK = tl.constexpr(BLOCK)


@triton.jit(do_not_specialize=["seed"])
def step(
    addresses,  # int64 [T, 8]
    pieces,  # int32 [gridDim, 2]
    scale_tensor,  # fp32 [1] or None
    scale, keep, l2, beta1_rest, beta2, beta2_rest, rate, root, eps, seed,
    GRAD: tl.constexpr, OUT: tl.constexpr, HALVES: tl.constexpr, MOMENTS: tl.constexpr, L2: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    row, start, left, rule,
    GRAD: tl.constexpr, OUT: tl.constexpr, HALVES: tl.constexpr, MOMENTS: tl.constexpr, L2: tl.constexpr,
    MASKED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    scale, keep, l2, beta1_rest, beta2, beta2_rest, rate, root, eps, seed = rule
    at = tl.arange(0, BLOCK)
    mask = at < left if MASKED else None
    param_at = _pointer(row, 0, "int16" if HALVES else "fp32", start, ALIGNED) + at
    grad_at = _pointer(row, 1, GRAD, start, ALIGNED) + at
    g = tl.load(grad_at, mask=mask).to(tl.float32) * scale
    m, v = _load_moments(row, start, left, mask, MOMENTS, ALIGNED, BLOCK)
    if HALVES:
        high_at = _pointer(row, 4, "int16", start, ALIGNED) + at
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
    _store_moments(row, m, v, start, left, mask, seed, MOMENTS, MASKED, ALIGNED, BLOCK)
    if OUT is not None:
        tl.store(_pointer(row, 4, OUT, start, ALIGNED) + at, p.to(tl.dtype(OUT)), mask=mask)


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


# ---- moments: the codec of moments.py, for non-negative values ----


@triton.jit
def _pointer(row, column: tl.constexpr, TYPE: tl.constexpr, start, ALIGNED: tl.constexpr):
    """Pointer to element `start` of the tensor in that column."""
    found = tl.load(row + column).to(tl.pointer_type(tl.dtype(TYPE))) + start
    # Alignment hint for vector accesses.
    return tl.multiple_of(found, 16) if ALIGNED else found


@triton.jit
def _load_moments(row, start, left, mask, MOMENTS: tl.constexpr, ALIGNED: tl.constexpr, N: tl.constexpr):
    """Both moments in fp32 [N]."""
    at = tl.arange(0, N)
    m = tl.load(_pointer(row, 2, MOMENTS, start, ALIGNED) + at, mask=mask)
    v = tl.load(_pointer(row, 3, MOMENTS, start, ALIGNED) + at, mask=mask)
    if MOMENTS == "bf16":
        m, v = m.to(tl.float32), v.to(tl.float32)
    elif MOMENTS == "uint8":
        first, second, there = _exponents(row, start, left, N)
        m = _decode(m, tl.load(first, mask=there), 20, 15, N)
        v = _decode(v, tl.load(second, mask=there), 21, 31, N)
    return m, v


@triton.jit
def _store_moments(
    row, m, v, start, left, mask, seed,
    MOMENTS: tl.constexpr, MASKED: tl.constexpr, ALIGNED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Both moments from fp32 [N]."""
    at = tl.arange(0, N)
    first_at = _pointer(row, 2, MOMENTS, start, ALIGNED) + at
    second_at = _pointer(row, 3, MOMENTS, start, ALIGNED) + at
    if MOMENTS != "fp32":
        m_bits, v_bits = m.to(tl.uint32, bitcast=True), v.to(tl.uint32, bitcast=True)
        m_size, v_size = m_bits & 0x7FFFFFFF, v_bits & 0x7FFFFFFF
        if MASKED:
            # Elements past the end belong to no block.
            m_size, v_size = tl.where(mask, m_size, 0), tl.where(mask, v_size, 0)
        x = (v_size * 0x9E3779B1 + m_size) ^ seed.to(tl.uint32, bitcast=True)
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        x = x ^ (x >> 16)
        if MOMENTS == "bf16":
            m, v = _narrowed(m_size, m_bits, x & 0xFFFF), _narrowed(v_size, v_bits, x >> 16)
        else:
            m_top, v_top = _top(m_size, 20, N), _top(v_size, 21, N)
            first, second, there = _exponents(row, start, left, N)
            tl.store(first, m_top.to(tl.uint8), mask=there)
            tl.store(second, v_top.to(tl.uint8), mask=there)
            m = _encode(m_size, m_bits, x & 0xFFFF, m_top, 0, 20, 15, N)
            v = _encode(v_size, v_bits, x >> 16, v_top, (v_size > 0).to(tl.int32), 21, 31, N)
    tl.store(first_at, m, mask=mask)
    tl.store(second_at, v, mask=mask)


@triton.jit
def _exponents(row, start, left, N: tl.constexpr):
    at = tl.arange(0, N // _BLOCK)
    first = _pointer(row, 5, "uint8", start // _BLOCK, False) + at
    second = _pointer(row, 6, "uint8", start // _BLOCK, False) + at
    return first, second, at * _BLOCK < left


@triton.jit
def _spread(exponent, N: tl.constexpr):
    wide = tl.broadcast_to(tl.reshape(exponent.to(tl.int32), (N // _BLOCK, 1)), (N // _BLOCK, _BLOCK))
    return tl.reshape(wide, (N,))


@triton.jit
def _top(size, CUT: tl.constexpr, N: tl.constexpr):
    largest = tl.max(tl.reshape(tl.minimum(size, 0x7FC00000).to(tl.int32), (N // _BLOCK, _BLOCK)), axis=1)
    return (largest + ((1 << CUT) - 1)) >> 23


@triton.jit
def _decode(code, exponent, CUT: tl.constexpr, SPAN: tl.constexpr, N: tl.constexpr):
    kept = (code & 0x7F).to(tl.int32)
    size = (kept << CUT) + (_spread(exponent, N) - SPAN) * (1 << 23)
    size = tl.where((kept > 0) & (size >= 1 << 23), size, 0).to(tl.uint32, bitcast=True)
    return (size | (code.to(tl.uint32) & 0x80) << 24).to(tl.float32, bitcast=True)


@triton.jit
def _encode(size, bits, chance, top, lowest, CUT: tl.constexpr, SPAN: tl.constexpr, N: tl.constexpr):
    cut = (tl.minimum(size, 0x7FC00000) + (chance << (CUT - 16))) >> CUT
    code = cut.to(tl.int32) - (_spread(top, N) - SPAN) * (1 << (23 - CUT))
    code = tl.where(size >= 1 << 23, code, 0)
    code = tl.minimum(tl.maximum(code, lowest), 0x7F).to(tl.uint32)
    return (code | (bits >> 24) & 0x80).to(tl.uint8)


@triton.jit
def _narrowed(size, bits, chance):
    code = (tl.minimum(size, 0x7FC00000) + chance) >> 16 | (bits >> 16) & 0x8000
    return code.to(tl.uint16).to(tl.bfloat16, bitcast=True)
