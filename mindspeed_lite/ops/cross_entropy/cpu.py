"""cross_entropy on CPU: C++ kernels for bf16 and fp32 logits."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lite.ops import native

LIBRARY = native.Library(__file__)
DTYPES = native.DTYPES


def statistics(rows: Tensor, target: Tensor, start: int, entropy: bool = False) -> Tensor:
    """[3, T]; with `entropy` [4, T], as `loss.merge` takes them."""
    count, width = rows.shape
    out = torch.empty(4 if entropy else 3, count, dtype=torch.float32)
    kernel = LIBRARY.kernel("statistics", rows.dtype)
    kernel(rows, target, out, count, width, start, entropy, native.threads(rows.numel()))
    return out


def gradient(rows: Tensor, target: Tensor, start: int, statistics: Tensor, dloss: Tensor, out: Tensor) -> None:
    _gradient(rows, target, start, statistics, dloss, dloss, None, out)


def entropy_gradient(
    rows: Tensor, target: Tensor, start: int, statistics: Tensor, dloss: Tensor, entropy: Tensor, dentropy: Tensor
) -> None:
    """Overwrites rows with the gradient of loss and entropy."""
    outer = dloss - dentropy * (entropy - statistics[1].log())
    _gradient(rows, target, start, statistics, dloss, outer, -dentropy, rows)


def _gradient(
    rows: Tensor,
    target: Tensor,
    start: int,
    statistics: Tensor,
    dloss: Tensor,
    outer: Tensor,
    slope: Tensor | None,
    out: Tensor,
) -> None:
    count, width = rows.shape
    kernel = LIBRARY.kernel("gradient", rows.dtype)
    threads = native.threads(rows.numel())
    kernel(rows, target, *statistics, dloss, outer, slope, out, count, width, start, threads)
