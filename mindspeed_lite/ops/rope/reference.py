"""Reference of rope."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.rows import precision

Pairs = Literal["half", "interleaved", "regrouped"]


class RotationSpec(NamedTuple):
    pairs: Pairs = "half"
    start: int = 0
    scale: float = 1.0
    transposed: bool = False
    """The gradient's rotation, which only backends compute."""

    @property
    def sides(self) -> tuple[bool, bool]:
        """Whether pairs are interleaved in the input, and in the output."""
        into, out = self.pairs != "half", self.pairs == "interleaved"
        return (out, into) if self.transposed else (into, out)


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, spec: RotationSpec) -> Tensor:
    dtype = precision(x.dtype)
    width = cos.shape[-1]

    def rows(table: Tensor) -> Tensor:
        chosen = table[: x.shape[0]] if positions is None else table.index_select(0, positions)
        return chosen.to(dtype) * spec.scale  # [s, 1 or b, 1, R]

    before, turned, after = torch.split(x, [spec.start, width, x.shape[-1] - spec.start - width], -1)
    into, out = spec.sides
    x1, x2 = _halves(turned.to(dtype), into)  # [s, b, n, R/2] each
    cos1, cos2 = _halves(rows(cos), out)
    sin1, sin2 = _halves(rows(sin), out)
    y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    y = torch.stack((y1, y2), -1).flatten(-2) if out else torch.cat((y1, y2), -1)
    return torch.cat((before, y.to(x.dtype), after), -1)


def _halves(t: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return t[..., 0::2], t[..., 1::2]
    first, second = t.chunk(2, -1)
    return first, second
