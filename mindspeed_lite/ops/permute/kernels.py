"""Triton kernels of permute: row ids in two passes; one program per token."""

# A kernel's parameters have no types in Python.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_kernel(routed, counts, tokens, experts, blocks, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """counts [E, blocks]: tokens of each block per expert."""
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    inside = (token[:, None] < tokens) & (expert[None, :] < experts)
    flags = tl.load(routed + token[:, None] * experts + expert[None, :], mask=inside, other=0).to(tl.int32)
    tl.store(counts + expert * blocks + block, tl.sum(flags, axis=0), mask=expert < experts)


@triton.jit
def _rows(routed, ends, tokens, experts, blocks, limit, stride, flat, TOKENS, EXPERTS):
    """Pairs of a token block [TOKENS, EXPERTS], their rows, and whether they have one.

    Rank: routed pairs before it; unrouted pairs follow all routed ones. Counted per expert (flat 0) or globally (flat
    T). ends [E, blocks]: running sums of the counts.
    """
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = (token < tokens) & (expert < experts)
    pair = token * experts + expert
    flags = tl.load(routed + pair, mask=inside, other=0).to(tl.int32)
    end = tl.load(ends + expert * blocks + block, mask=expert < experts, other=0)
    seen = end - tl.sum(flags, axis=0)[None, :] + tl.cumsum(flags, axis=0) - flags
    last = tl.where(flat > 0, experts, expert + 1) * blocks - 1
    total = tl.load(ends + last, mask=expert < experts, other=0)
    rank = tl.where(flags != 0, seen, total + expert * flat + token - seen)
    return pair, expert * stride + rank, inside & (rank < limit)


@triton.jit
def pair_kernel(
    routed, ends, pairs, offsets, tokens, experts, blocks, limit, stride, flat,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """pairs, and offsets [T + 1]: 0, then the rows of each token."""
    pair, row, has = _rows(routed, ends, tokens, experts, blocks, limit, stride, flat, TOKENS, EXPERTS)
    tl.store(pairs + row, pair, mask=has)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    tl.store(offsets + 1 + token, tl.sum(has.to(tl.int32), axis=1), mask=token < tokens)
    if tl.program_id(0) == 0:
        tl.store(offsets, 0)


@triton.jit
def order_kernel(
    routed, ends, offsets, order, tokens, experts, blocks, limit, stride, flat,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    _, row, has = _rows(routed, ends, tokens, experts, blocks, limit, stride, flat, TOKENS, EXPERTS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    offset = tl.load(offsets + token, mask=token < tokens, other=0)
    place = offset[:, None] + tl.cumsum(has.to(tl.int32), axis=1) - 1
    tl.store(order + place, row, mask=has)


@triton.jit
def spread_kernel(x, order, offsets, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(x + token * stride + column, mask=inside)
    i = tl.load(offsets + token)
    end = tl.load(offsets + token + 1)
    while i < end:
        row = tl.load(order + i).to(tl.int64)
        tl.store(out + row * WIDTH + column, value, mask=inside)
        i += 1


@triton.jit
def gather_kernel(
    x, order, offsets, pairs, probs, out, stride,
    WIDTH: tl.constexpr, HAS_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    i = tl.load(offsets + token)
    end = tl.load(offsets + token + 1)
    while i < end:
        row = tl.load(order + i).to(tl.int64)
        value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_PROBS:
            value *= tl.load(probs + tl.load(pairs + row)).to(tl.float32)
        total += value
        i += 1
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dy, x, order, offsets, pairs, probs, dx, dprobs, dy_stride, stride,
    WIDTH: tl.constexpr, WANTS_DPROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    i = tl.load(offsets + token)
    end = tl.load(offsets + token + 1)
    while i < end:
        row = tl.load(order + i).to(tl.int64)
        pair = tl.load(pairs + row)
        weight = tl.load(probs + pair).to(tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < WIDTH
            gradient = tl.load(dy + token * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
            if WANTS_DPROBS:
                total += gradient * tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + row * WIDTH + column, (gradient * weight).to(dx.dtype.element_ty), mask=inside)
        if WANTS_DPROBS:
            tl.store(dprobs + pair, tl.sum(total).to(dprobs.dtype.element_ty))
        i += 1
