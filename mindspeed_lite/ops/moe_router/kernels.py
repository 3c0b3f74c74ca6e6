"""moe_router in Triton: everything but the choice, a tile of whole rows per program.

Each row of [T, E] is written once: columns are compared with the chosen experts in turn.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# constexpr: kernels see no other globals.
SOFTMAX = tl.constexpr("softmax")
SIGMOID = tl.constexpr("sigmoid")
SQRTSOFTPLUS = tl.constexpr("sqrtsoftplus")
EPS = tl.constexpr(1e-20)


@triton.jit
def _spread(at, value, column, TOPK: tl.constexpr, KBLOCK: tl.constexpr):
    """value [ROWS, KBLOCK] at the columns `at`, 0 elsewhere: [ROWS, BLOCK]."""
    place = tl.arange(0, KBLOCK)[None, :]
    out = tl.zeros([at.shape[0], column.shape[0]], dtype=value.dtype)
    for j in range(TOPK):
        here = tl.sum(tl.where(place == j, at, 0), axis=1)
        this = tl.sum(tl.where(place == j, value, 0), axis=1)
        out += tl.where(column[None, :] == here[:, None], this[:, None], 0)
    return out


@triton.jit
def _slope(s, SCORES: tl.constexpr):
    """Derivative by the logit, from the score."""
    if SCORES == SIGMOID:
        out = s * (1.0 - s)
    else:
        # s = sqrt(u), u = log(1 + e^x): e^x / (1 + e^x) = 1 - e^-u, as a series where it cancels.
        u = s * s
        near = u * (1.0 - u * (0.5 - u * (1.0 / 6.0 - u * (1.0 / 24.0 - u * (1.0 / 120.0)))))
        share = tl.where(u < 0.125, near, 1.0 - tl.exp(-u))
        out = tl.where(s == 0.0, 0.0, share / (2.0 * tl.where(s == 0.0, 1.0, s)))
    return out


@triton.jit
def forward_kernel(
    scores, indices, probs, chosen, kept, rows, stride, scale,
    SCORES: tl.constexpr, NORMALISED: tl.constexpr, KEEPS: tl.constexpr,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, KBLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, KBLOCK)
    wanted = (row[:, None] < rows) & (place[None, :] < TOPK)
    flat = row[:, None] * TOPK + place[None, :]
    at = tl.load(indices + flat, mask=wanted, other=0)
    lowest = float("-inf") if SCORES == SOFTMAX else 0.0
    p = tl.load(scores + row[:, None] * stride + at, mask=wanted, other=lowest).to(tl.float32)
    if SCORES == SOFTMAX:
        p = tl.exp(p - tl.max(p, axis=1)[:, None])
        p = p / tl.sum(p, axis=1)[:, None]
    if KEEPS:
        tl.store(kept + flat, p, mask=wanted)
    if NORMALISED:
        p = p / (tl.sum(p, axis=1) + EPS)[:, None]
    p = p * scale
    column = tl.arange(0, BLOCK)
    out = row[:, None] * EXPERTS + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < EXPERTS)
    tl.store(probs + out, _spread(at, p, column, TOPK, KBLOCK).to(probs.dtype.element_ty), mask=inside)
    one = tl.full([ROWS, KBLOCK], 1, tl.int32)
    tl.store(chosen + out, _spread(at, one, column, TOPK, KBLOCK) > 0, mask=inside)


@triton.jit
def backward_kernel(
    dprobs, indices, kept, dlogits, rows, stride, scale,
    SCORES: tl.constexpr, NORMALISED: tl.constexpr,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, KBLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, KBLOCK)
    wanted = (row[:, None] < rows) & (place[None, :] < TOPK)
    flat = row[:, None] * TOPK + place[None, :]
    at = tl.load(indices + flat, mask=wanted, other=0)
    s = tl.load(kept + flat, mask=wanted, other=0.0)
    g = tl.load(dprobs + row[:, None] * stride + at, mask=wanted, other=0.0).to(tl.float32) * scale
    dot = tl.sum(g * s, axis=1)[:, None]
    if SCORES == SOFTMAX:
        d = s * (g - dot)
    else:
        if NORMALISED:
            total = (tl.sum(s, axis=1) + EPS)[:, None]
            g = (g - dot / total) / total
        d = tl.where(wanted, g, 0.0) * _slope(s, SCORES)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < EXPERTS)
    out = _spread(at, d, column, TOPK, KBLOCK)
    tl.store(dlogits + row[:, None] * EXPERTS + column[None, :], out.to(dlogits.dtype.element_ty), mask=inside)


@triton.jit
def backward_all_kernel(
    dprobs, indices, logits, dlogits, rows, stride, logits_stride, scale,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, KBLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Backward through the softmax over all experts, recomputed."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place, column = tl.arange(0, KBLOCK), tl.arange(0, BLOCK)
    wanted = (row[:, None] < rows) & (place[None, :] < TOPK)
    inside = (row[:, None] < rows) & (column[None, :] < EXPERTS)
    at = tl.load(indices + row[:, None] * TOPK + place[None, :], mask=wanted, other=0)
    g = tl.load(dprobs + row[:, None] * stride + at, mask=wanted, other=0.0).to(tl.float32) * scale
    x = tl.load(logits + row[:, None] * logits_stride + column[None, :], mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    p = tl.exp(x - tl.max(x, axis=1)[:, None])
    p = p / tl.sum(p, axis=1)[:, None]
    g = _spread(at, g, column, TOPK, KBLOCK)
    out = p * (g - tl.sum(tl.where(inside, g * p, 0.0), axis=1)[:, None])
    tl.store(dlogits + row[:, None] * EXPERTS + column[None, :], out.to(dlogits.dtype.element_ty), mask=inside)
