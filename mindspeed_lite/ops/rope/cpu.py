"""rope on CPU: a C++ kernel for any strides of x."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_lite.ops import native

if TYPE_CHECKING:
    from mindspeed_lite.ops.rope import Case, RotationSpec

_ARGUMENTS = "ppppp" + "l" * 12 + "fiiii"
_lib = native.Library(Path(__file__).with_name("cpu.cpp"), {"rope_bf16": _ARGUMENTS, "rope_fp32": _ARGUMENTS})


def supported(case: Case) -> list[str]:
    reasons = []
    if case.learned:
        reasons.append("cos and sin want a gradient")
    if case.dtype not in (torch.bfloat16, torch.float32):
        reasons.append(f"dtype {case.dtype}: the kernel takes bfloat16 and float32")
    unusable = None if reasons else _lib.unusable()
    return reasons if unusable is None else [unusable]


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, spec: RotationSpec) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    s, b, n, d = x.shape
    rows, batch, _, width = cos.shape
    into, out = spec.sides
    kernel = _lib.rope_bf16 if x.dtype is torch.bfloat16 else _lib.rope_fp32
    kernel(
        *(x, cos, sin, positions, y),
        *(s, b, n, d, width, spec.start, rows),
        *(*x.stride()[:3], batch * width, width if batch > 1 else 0),
        *(spec.scale, into, out, spec.transposed),
        native.threads(s * b * n * d),
    )
    return y
