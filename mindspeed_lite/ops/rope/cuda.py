"""rope on CUDA: a Triton kernel; each program rotates a block of heads of one token."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from mindspeed_lite.ops.rope import Case, RotationSpec
from mindspeed_lite.ops.row_kernels import cdiv, next_power_of_2, on

# Elements of x per program: 16 per thread of 4 warps.
_TILE = 2048
_WARPS = 4


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supported(case: Case) -> list[str]:
    return ["cos and sin want a gradient"] if case.learned else []


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, spec: RotationSpec) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    s, b, n, d = x.shape
    rows, batch, _, width = cos.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    into, out = spec.sides
    block_pairs = next_power_of_2(max(width // 2, 1))
    block_heads = min(next_power_of_2(n), max(1, _TILE // (2 * block_pairs)))
    passed = d - width
    with on(x):
        _kernel[s * b, cdiv(n, block_heads)](
            x, cos, sin, positions, y, b, n, d, width, spec.start, rows, *x.stride()[:3],
            batch * width, width if batch > 1 else 0, spec.scale,
            INTO=into, OUT=out, TRANSPOSED=spec.transposed, PASSED=next_power_of_2(passed) if passed else 0,
            BLOCK_PAIRS=block_pairs, BLOCK_HEADS=block_heads,
            num_warps=_WARPS if block_heads * block_pairs * 2 >= _TILE else 1,
        )  # fmt: skip
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _load_pairs(pointers, width, mask, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Halves [ROWS, BLOCK_PAIRS]; `pointers` and `mask` are [ROWS, 1]."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        both = tl.load(pointers + column, mask=mask & (column < width), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (ROWS, BLOCK_PAIRS, 2)))
    else:
        column = tl.arange(0, BLOCK_PAIRS)[None, :]
        inside = mask & (column < width // 2)
        first = tl.load(pointers + column, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(pointers + width // 2 + column, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    x, cos, sin, positions, y, b, n, d, width, start, rows, stride_s, stride_b, stride_n, row, batch, scale,
    INTO: tl.constexpr, OUT: tl.constexpr, TRANSPOSED: tl.constexpr, PASSED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at, sequence = token // b, token % b
    position = at
    if positions is not None:
        position = tl.load(positions + at).to(tl.int64)
    known = (position >= 0) & (position < rows)
    table = tl.where(known, position * row + sequence * batch, 0)
    TABLE: tl.constexpr = INTO and OUT
    everything = tl.full((1, 1), 1, tl.int1)
    nothing = tl.zeros((1, 1), tl.int64)
    cos1, cos2 = _load_pairs(cos + table + nothing, width, everything, TABLE, BLOCK_PAIRS, 1)
    sin1, sin2 = _load_pairs(sin + table + nothing, width, everything, TABLE, BLOCK_PAIRS, 1)
    # No row: reads no memory and gives NaN.
    factor = tl.where(known, scale, float("nan"))
    cos1, cos2, sin1, sin2 = cos1 * factor, cos2 * factor, sin1 * factor, sin2 * factor
    if TRANSPOSED:
        sin1, sin2 = -sin2, -sin1

    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    mask = head < n
    source = x + at * stride_s + sequence * stride_b + head.to(tl.int64) * stride_n
    target = y + (token * n + head) * d
    x1, x2 = _load_pairs(source + start, width, mask, INTO, BLOCK_PAIRS, BLOCK_HEADS)
    y1 = (x1 * cos1 - x2 * sin1).to(y.dtype.element_ty)
    y2 = (x2 * cos2 + x1 * sin2).to(y.dtype.element_ty)
    if OUT:
        column = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        both = tl.reshape(tl.join(y1, y2), (BLOCK_HEADS, 2 * BLOCK_PAIRS))
        tl.store(target + start + column, both, mask=mask & (column < width))
    else:
        column = tl.arange(0, BLOCK_PAIRS)[None, :]
        inside = mask & (column < width // 2)
        tl.store(target + start + column, y1, mask=inside)
        tl.store(target + start + width // 2 + column, y2, mask=inside)
    if PASSED:
        column = tl.arange(0, PASSED)[None, :]
        column = tl.where(column < start, column, column + width)
        copied = mask & (column < d)
        tl.store(target + column, tl.load(source + column, mask=copied), mask=copied)
