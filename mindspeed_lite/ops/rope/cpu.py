"""rope on CPU: a C++ kernel for any strides of x."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lite.ops import native
from mindspeed_lite.ops.rope import Case, RotationSpec

LIBRARY = native.Library(__file__)
DTYPES = native.DTYPES


def supported(case: Case) -> list[str]:
    return ["cos and sin want a gradient"] if case.learned else []


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, spec: RotationSpec) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    s, b, n, d = x.shape
    rows, batch, _, width = cos.shape
    into, out = spec.sides
    LIBRARY.kernel("rope", x.dtype)(
        *(x, cos, sin, positions, y),
        *(s, b, n, d, width, spec.start, rows),
        *(*x.stride()[:3], batch * width, width if batch > 1 else 0),
        *(spec.scale, into, out, spec.transposed),
        native.threads(s * b * n * d),
    )
    return y
