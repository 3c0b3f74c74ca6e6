"""rope on CPU: a C++ kernel for any strides of x."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mindspeed_lite.ops import native
from mindspeed_lite.ops.rope import reference
from mindspeed_lite.ops.rope.rotation import RotationSpec, rotate
from mindspeed_lite.ops.storage_cache import StorageVersionCache

if TYPE_CHECKING:
    from mindspeed_lite.ops.rope import Case, Pairs

_ARGUMENTS = "ppppp" + "l" * 12 + "fiiii"
# fp32 copies of 16-bit cos and sin.
_kept = StorageVersionCache()
_lib = native.Library(Path(__file__).with_name("cpu.cpp"), {"rope_bf16": _ARGUMENTS, "rope_fp32": _ARGUMENTS})


def supported(case: Case) -> list[str]:
    reasons = []
    if case.learned:
        reasons.append("cos and sin want a gradient")
    unusable = _lib.unusable() if case.dtype in (torch.bfloat16, torch.float32) else None
    if unusable is not None:
        reasons.append(unusable)
    return reasons


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pairs: Pairs = "half",
    start: int = 0,
    scale: float = 1.0,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    # torch.compile fuses the plain formula; fake tensors have no address.
    plain = torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter)
    if plain or x.dtype not in (torch.bfloat16, torch.float32):
        return reference.rope(x, cos, sin, pairs, start, scale, positions)
    return rotate(_turn, x, cos, sin, positions, RotationSpec(pairs, start, scale))


def _turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None, how: RotationSpec
) -> torch.Tensor:
    stride_s, stride_b, stride_n, stride_d = x.stride()
    if stride_d != 1:
        return _turn(x.contiguous(), cos, sin, positions, how)
    cos, sin = _plain(cos), _plain(sin)
    y = torch.empty(x.shape, dtype=x.dtype)
    s, b, n, d = x.shape
    rows, batch, _, width = cos.shape
    into, out = how.sides
    kernel = _lib.rope_bf16 if x.dtype is torch.bfloat16 else _lib.rope_fp32
    kernel(
        *(x, cos, sin, positions, y),
        *(s, b, n, d, width, how.start, rows),
        *(stride_s, stride_b, stride_n, batch * width, width if batch > 1 else 0),
        *(how.scale, into, out, how.transposed),
        native.threads(s * b * n * d),
    )
    return y


def _plain(table: torch.Tensor) -> torch.Tensor:
    if table.dtype is torch.float32 and table.is_contiguous():
        return table
    return _kept.get(table, "fp32", lambda: table.float().contiguous())
