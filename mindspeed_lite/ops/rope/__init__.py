"""Rotary position embedding (RoPE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from mindspeed_lite.ops import autograd
from mindspeed_lite.ops.batch_invariant import CANN
from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.rope import reference
from mindspeed_lite.ops.rope.reference import Pairs, RotationSpec

__all__ = ["OPERATOR", "Case", "Pairs", "RotationSpec", "rope"]

PAIRS: tuple[Pairs, ...] = get_args(Pairs)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Case(NamedTuple):
    """Backend selection key; batch_angles: angles differ by sequence. learned: cos or sin need gradients."""

    device: str
    dtype: torch.dtype
    pairs: Pairs
    width: int
    batch: int
    heads: int
    batch_angles: bool
    learned: bool


OPERATOR = Operator("rope", reference.rope, batch_dependence={"reference": "", "cpu": "", "cuda": "", "npu": CANN})


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    pairs: Pairs = "half",
    start: int = 0,
    scale: float = 1.0,
    positions: Tensor | None = None,
) -> Tensor:
    """y1 = x1 * cos1 - x2 * sin1, y2 = x2 * cos2 + x1 * sin2 for the pairs of x[start : start + R].

    x: [s, b, n, d], or [t, n, d] packed. y: contiguous; other elements are copied. cos, sin: [rows, 1 or b, 1, R], R
    even, from `angles.cos_sin`; multiplied by `scale`. x[i] has row i, or positions[i] (integers [s] on x's device, -1
    for none).

    Halves 1 and 2 by `pairs`:
        half         x1 = x[: R/2], x2 = x[R/2 :], and y alike
        interleaved  x1 = x[0::2], x2 = x[1::2], and y, cos and sin alike
        regrouped    x1 = x[0::2], x2 = x[1::2]; y, cos and sin in halves (multi-latent attention)

    Computed in fp32 (float64 for float64), rounded once. Saves only cos, sin and positions. Raises ValueError. A
    position without a row fails in the reference and gives NaN elsewhere, without synchronisation.
    """
    rotate = OPERATOR.choose(_case(x, cos, sin, pairs, start, positions), x)
    if positions is not None:
        # Kernels read contiguous int64.
        positions = positions.to(torch.int64).contiguous()
    given = (x if x.dim() == 4 else x.unsqueeze(1), cos, sin, positions)
    spec = RotationSpec(pairs, start, scale)
    differentiable = rotate is reference.rope
    y: Tensor = rotate(*given, spec) if differentiable else autograd.apply(_ROTATION, given, (rotate, spec))
    return y if x.dim() == 4 else y.squeeze(1)


def _forward(inputs: Any, options: Any) -> tuple[Tensor, autograd.Inputs]:
    rotate, spec = options
    return rotate(*inputs, spec), inputs[1:]


def _backward(dy: Tensor, saved: Any, options: Any, wanted: Sequence[bool]) -> autograd.Inputs:
    rotate, spec = options
    return rotate(dy, *saved, spec._replace(transposed=True)), None, None, None


_ROTATION = autograd.Kernel(_forward, _backward)


def _case(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, start: int, positions: Tensor | None) -> Case:
    shape = x.shape if x.dim() != 3 else (x.shape[0], 1, *x.shape[1:])
    if len(shape) != 4 or cos.dim() != 4 or cos.shape != sin.shape:
        raise ValueError(
            "rope: want x [s, b, n, d] or [t, n, d] and cos and sin [rows, 1 or b, 1, R], not "
            f"{tuple(x.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    s, b, n, d = shape
    rows, batch, heads, width = cos.shape
    if pairs not in PAIRS:
        raise ValueError(f"rope: pairs is one of {', '.join(PAIRS)}, not {pairs!r}")
    if batch not in (1, b) or heads != 1 or width % 2 or start < 0 or start + width > d:
        raise ValueError(
            f"rope: cos and sin {tuple(cos.shape)} do not fit x {tuple(x.shape)} from element {start} on: want "
            "[rows, 1 or b, 1, R] with R even and within the head"
        )
    if rows < s if positions is None else positions.shape != (s,):
        what = f"{rows} rows" if positions is None else f"positions {tuple(positions.shape)}"
        raise ValueError(f"rope: {what} for x {tuple(x.shape)}: want one for each of its {s} tokens")
    tables = (cos, sin) if positions is None else (cos, sin, positions)
    if any(t.device != x.device for t in tables):
        where = ", ".join(str(t.device) for t in tables)
        raise ValueError(f"rope: cos, sin and positions on {where}: want x's device, {x.device}")
    if positions is not None and positions.dtype not in _INTEGERS:
        raise ValueError(f"rope: positions are {positions.dtype}: want integers")
    return Case(x.device.type, x.dtype, pairs, width, b, n, batch > 1, cos.requires_grad or sin.requires_grad)
