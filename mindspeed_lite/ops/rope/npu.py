"""rope on Ascend NPUs: torch_npu's fused operator.

torch_npu's backward saves x for gradients of cos and sin; ours reruns the operator with transposed factors. cos and sin
are rounded to x's dtype, as in PyTorch's 16-bit composition. They are documented for [-1, 1], so `scale` is applied
afterwards; pre-scaled tables pass unchanged.
"""

from __future__ import annotations

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from mindspeed_lite.ops.rope import Case, RotationSpec
from mindspeed_lite.ops.storage_cache import StorageVersionCache

# Documented exclusive limits: head size; sequences and heads.
_WIDTH, _COUNT = 896, 1000

_kept = StorageVersionCache()


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supported(case: Case) -> list[str]:
    reasons = []
    if case.learned:
        reasons.append("cos and sin want a gradient")
    if not 0 < case.width < _WIDTH:
        reasons.append(f"{case.width} elements to turn: npu_rotary_mul takes fewer than {_WIDTH}, and at least 2")
    if case.batch >= _COUNT or case.heads >= _COUNT:
        reasons.append(
            f"{case.batch} sequences of {case.heads} heads: npu_rotary_mul takes fewer than {_COUNT} of each"
        )
    elif case.pairs == "interleaved" and case.batch * case.heads >= _COUNT:
        reasons.append(f"{case.batch} x {case.heads} interleaved heads: npu_rotary_mul takes fewer than {_COUNT}")
    if case.pairs == "interleaved" and case.batch_angles:
        reasons.append("interleaved pairs with angles of each sequence's own: npu_rotary_mul takes one for all")
    return reasons


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, spec: RotationSpec) -> Tensor:
    width = cos.shape[-1]
    into, out = spec.sides
    factors = _factors(cos, sin, x.dtype, into and out, spec.transposed)
    r1, r2 = (t[: x.shape[0]] if positions is None else _rows(t, positions) for t in factors)
    before, turned, after = torch.split(x, [spec.start, width, x.shape[-1] - spec.start - width], -1)
    if into and not out:
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), -1)
    y: Tensor = torch_npu.npu_rotary_mul(turned, r1, r2, rotary_mode="interleave" if into and out else "half")
    if spec.scale != 1.0:
        y = y * spec.scale
    if out and not into:
        y = torch.stack(y.chunk(2, -1), -1).flatten(-2)
    return y if y.shape == x.shape else torch.cat((before, y, after), -1)


def _rows(table: Tensor, positions: Tensor) -> Tensor:
    """`table` [rows, ...] at positions [s], NaN where there is no row; cached."""
    rows = table.shape[0]
    # Out-of-range indices are undefined on a device; they use an extra NaN row.
    extended = _kept.get(table, "extended", lambda: torch.cat((table, torch.full_like(table[:1], torch.nan))))
    index = _kept.get(positions, rows, lambda: torch.where((positions >= 0) & (positions < rows), positions, rows))
    return extended.index_select(0, index)


def _factors(
    cos: Tensor, sin: Tensor, dtype: torch.dtype, interleaved: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, 1 or b, 1, R] in `dtype`; transposed: sin negated with halves swapped."""

    def swapped() -> Tensor:
        if interleaved:
            return sin.view(*sin.shape[:-1], -1, 2).flip(-1).view(sin.shape).mul(-1).to(dtype)
        return sin.roll(sin.shape[-1] // 2, -1).mul(-1).to(dtype)

    r1 = _kept.get(cos, dtype, lambda: cos.to(dtype))
    r2 = _kept.get(sin, (dtype, interleaved, transposed), swapped if transposed else lambda: sin.to(dtype))
    return r1, r2
