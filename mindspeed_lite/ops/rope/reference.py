"""Reference of rope."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mindspeed_lite.ops.rope import Pairs


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pairs: Pairs = "half",
    start: int = 0,
    scale: float = 1.0,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    width = cos.shape[-1]

    def rows(table: torch.Tensor) -> torch.Tensor:
        chosen = table[: x.shape[0]] if positions is None else table.index_select(0, positions)
        return chosen.to(dtype) * scale  # [s, 1 or b, 1, R]

    before, turned, after = torch.split(x, [start, width, x.shape[-1] - start - width], -1)
    x1, x2 = _halves(turned.to(dtype), pairs != "half")  # [s, b, n, R/2] each
    cos1, cos2 = _halves(rows(cos), pairs == "interleaved")
    sin1, sin2 = _halves(rows(sin), pairs == "interleaved")
    y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    y = torch.stack((y1, y2), -1).flatten(-2) if pairs == "interleaved" else torch.cat((y1, y2), -1)
    return torch.cat((before, y.to(x.dtype), after), -1)


def _halves(t: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return t[..., 0::2], t[..., 1::2]
    first, second = t.chunk(2, -1)
    return first, second
