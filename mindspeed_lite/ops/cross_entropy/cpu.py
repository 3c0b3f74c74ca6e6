"""cross_entropy on CPU: C++ kernels for bf16 and fp32 logits."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lite.ops import native

LIBRARY = native.Library(__file__)
DTYPES = native.DTYPES


def statistics(rows: Tensor, target: Tensor, start: int) -> Tensor:
    count, width = rows.shape
    out = torch.empty(3, count, dtype=torch.float32)
    kernel = LIBRARY.kernel("statistics", rows.dtype)
    threads = native.threads(rows.numel())
    kernel(rows, target, out, count, width, start, threads)
    return out


def gradient(rows: Tensor, target: Tensor, start: int, statistics: Tensor, dloss: Tensor, out: Tensor) -> None:
    count, width = rows.shape
    kernel = LIBRARY.kernel("gradient", rows.dtype)
    kernel(rows, target, *statistics, dloss, out, count, width, start, native.threads(rows.numel()))
