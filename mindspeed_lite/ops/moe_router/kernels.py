"""moe_router in Triton: everything but the scores, a tile of whole rows per program.

Each row of [T, E] is read and written once. Experts are chosen in turn, by keys: int32 in the order of the scores.
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
LEAST = tl.constexpr(-(2**31))  # below the key of any score
CLOSED = tl.constexpr(-0x7F800001)  # the key of minus infinity


@triton.jit
def _key_of(x):
    """int32 in torch.topk's order of fp32: NaN first, 0.0 before -0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _score_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(key, place):
    """Highest key of the last dimension, its first place, and the keys without it."""
    axis: tl.constexpr = len(key.shape) - 1
    highest = tl.max(key, axis=axis, keep_dims=True)
    first = tl.min(tl.where(key == highest, place, 0x7FFFFFFF), axis=axis, keep_dims=True)
    return highest, first, tl.where(place == first, LEAST, key)


@triton.jit
def _close_groups(key, score_type, NUMBER: tl.constexpr, CHOSEN: tl.constexpr, BEST: tl.constexpr):
    """key [ROWS, G, S]: minus infinity outside the CHOSEN groups with the highest sums of their BEST scores."""
    rest, place = key, tl.arange(0, key.shape[2])[None, None, :]
    worth = tl.zeros([key.shape[0], key.shape[1], 1], tl.float32)
    for _ in range(BEST):
        highest, _, rest = _best(rest, place)
        worth += _score_of(highest)
    worth = tl.reshape(worth, [key.shape[0], key.shape[1]]).to(score_type).to(tl.float32)  # as torch.sum rounds
    group = tl.arange(0, key.shape[1])[None, :]
    left = tl.where(group < NUMBER, _key_of(worth), LEAST)
    for _ in range(CHOSEN):
        _, _, left = _best(left, group)
    is_open = (left == LEAST) & (group < NUMBER)
    return tl.where(is_open[:, :, None] | (key == LEAST), key, CLOSED)


@triton.jit
def _chosen(indices, dprobs, row, place, rows, stride, scale, TOPK: tl.constexpr):
    """Chosen experts at `place`: flat positions, their mask, expert indices, and gradients."""
    wanted = (row < rows) & (place < TOPK)
    flat = row * TOPK + place
    at = tl.load(indices + flat, mask=wanted, other=0)
    g = tl.load(dprobs + row * stride + at, mask=wanted, other=0.0).to(tl.float32) * scale
    return flat, wanted, at, g


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
    scores, bias, indices, probs, chosen, kept, rows, stride, scale,
    SCORES: tl.constexpr, NORMALISED: tl.constexpr, KEEPS: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_CHOSEN: tl.constexpr, GROUP_BEST: tl.constexpr,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, KBLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    GBLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # Groups padded to powers of two.
    SIZE: tl.constexpr = EXPERTS // GROUPS
    SBLOCK: tl.constexpr = BLOCK // GBLOCK
    slot = tl.arange(0, BLOCK)
    column = slot // SBLOCK * SIZE + slot % SBLOCK
    is_expert = (slot % SBLOCK < SIZE) & (slot // SBLOCK < GROUPS)
    inside = (row[:, None] < rows) & is_expert[None, :]
    score = tl.load(scores + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    by = score
    if bias is not None:
        by += tl.load(bias + column, mask=is_expert, other=0.0).to(tl.float32)[None, :]
    key = tl.where(is_expert[None, :], _key_of(by), LEAST)
    if GROUPS > 1:
        key = tl.reshape(key, [ROWS, GBLOCK, SBLOCK])
        key = _close_groups(key, scores.dtype.element_ty, GROUPS, GROUPS_CHOSEN, GROUP_BEST)
        key = tl.reshape(key, [ROWS, BLOCK])

    place = tl.arange(0, KBLOCK)[None, :]
    lowest = float("-inf") if SCORES == SOFTMAX else 0.0
    at = tl.zeros([ROWS, KBLOCK], tl.int32)
    p = tl.full([ROWS, KBLOCK], lowest, tl.float32)
    for j in range(TOPK):
        _, first, key = _best(key, column[None, :])
        at = tl.where(place == j, first, at)
        own = tl.sum(tl.where(column[None, :] == first, score, 0.0), axis=1, keep_dims=True)
        p = tl.where(place == j, own, p)
    wanted = (row[:, None] < rows) & (place < TOPK)
    flat = row[:, None] * TOPK + place
    tl.store(indices + flat, at, mask=wanted)
    if SCORES == SOFTMAX:
        top = tl.max(p, axis=1)[:, None]
        p = tl.exp(p - top)
        total = tl.sum(p, axis=1)[:, None]
        p, score = p / total, tl.exp(score - top) / total
    if KEEPS:
        tl.store(kept + flat, p, mask=wanted)
    if NORMALISED:
        score = score / (tl.sum(p, axis=1) + EPS)[:, None]
    is_chosen = key == LEAST
    out = row[:, None] * EXPERTS + column[None, :]
    tl.store(probs + out, tl.where(is_chosen, score * scale, 0.0).to(probs.dtype.element_ty), mask=inside)
    tl.store(chosen + out, is_chosen, mask=inside)


@triton.jit
def backward_kernel(
    dprobs, indices, kept, dlogits, rows, stride, scale,
    SCORES: tl.constexpr, NORMALISED: tl.constexpr,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, KBLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    places, present, _, gradients = _chosen(
        indices, dprobs, row, tl.arange(0, KBLOCK)[None, :], rows, stride, scale, TOPK
    )  # fmt: skip
    chosen = tl.load(kept + places, mask=present, other=0.0)
    dot = tl.sum(gradients * chosen, axis=1, keep_dims=True)
    total = tl.sum(chosen, axis=1, keep_dims=True) + EPS
    out = tl.zeros([ROWS, BLOCK], tl.float32)
    # Again, one by one: every thread of a row needs them.
    for j in range(TOPK):
        flat, wanted, at, g = _chosen(indices, dprobs, row, j, rows, stride, scale, TOPK)
        s = tl.load(kept + flat, mask=wanted, other=0.0)
        if SCORES == SOFTMAX:
            d = s * (g - dot)
        elif NORMALISED:
            d = (g - dot / total) / total * _slope(s, SCORES)
        else:
            d = g * _slope(s, SCORES)
        out = tl.where(column == at, d, out)
    inside = (row < rows) & (column < EXPERTS)
    tl.store(dlogits + row * EXPERTS + column, out.to(dlogits.dtype.element_ty), mask=inside)


@triton.jit
def backward_all_kernel(
    dprobs, indices, logits, dlogits, rows, stride, logits_stride, scale,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Backward through the softmax over all experts, recomputed."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < EXPERTS)
    x = tl.load(logits + row * logits_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    p = p / tl.sum(p, axis=1, keep_dims=True)
    gradient = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in range(TOPK):
        _, _, at, g = _chosen(indices, dprobs, row, j, rows, stride, scale, TOPK)
        gradient = tl.where(column == at, g, gradient)
    out = p * (gradient - tl.sum(tl.where(inside, gradient * p, 0.0), axis=1, keep_dims=True))
    tl.store(dlogits + row * EXPERTS + column, out.to(dlogits.dtype.element_ty), mask=inside)
