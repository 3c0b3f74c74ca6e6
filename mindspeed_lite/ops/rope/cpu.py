"""rope on CPU: a C++ kernel for any strides of x."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_lite.ops import native

if TYPE_CHECKING:
    from mindspeed_lite.ops.rope import Case, RotationSpec

_lib = native.Library(Path(__file__).with_name("cpu.cpp"), kernels={"rope": "ppppp" + "l" * 12 + "fiiii"})


def supported(case: Case) -> list[str]:
    return _lib.why_not(case.dtype, *(["cos and sin want a gradient"] if case.learned else ()))


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, spec: RotationSpec) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    s, b, n, d = x.shape
    rows, batch, _, width = cos.shape
    into, out = spec.sides
    _lib.kernel("rope", x.dtype)(
        *(x, cos, sin, positions, y),
        *(s, b, n, d, width, spec.start, rows),
        *(*x.stride()[:3], batch * width, width if batch > 1 else 0),
        *(spec.scale, into, out, spec.transposed),
        native.threads(s * b * n * d),
    )
    return y
