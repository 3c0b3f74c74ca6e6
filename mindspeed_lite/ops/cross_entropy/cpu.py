"""cross_entropy on CPU: C++ kernels for bf16 and fp32 logits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_lite.ops import native

if TYPE_CHECKING:
    from mindspeed_lite.ops.cross_entropy import Case

library = native.Library(
    Path(__file__).with_name("cpu.cpp"),
    kernels={"cross_entropy_statistics": "ppplllii", "cross_entropy_gradient": "ppppppllli"},
)


def supported(case: Case) -> list[str]:
    return library.why_not(case.dtype)


def statistics(rows: Tensor, target: Tensor, start: int, whole: bool) -> Tensor:
    count, width = rows.shape
    out = torch.empty(3, count, dtype=torch.float32)
    kernel = library.kernel("cross_entropy_statistics", rows.dtype)
    threads = native.threads(rows.numel())
    kernel(rows, target, out, count, width, start, whole, threads)
    return out


def gradient(rows: Tensor, target: Tensor, start: int, statistics: Tensor, dloss: Tensor, out: Tensor) -> None:
    count, width = rows.shape
    kernel = library.kernel("cross_entropy_gradient", rows.dtype)
    kernel(rows, target, *statistics, dloss, out, count, width, start, native.threads(rows.numel()))
