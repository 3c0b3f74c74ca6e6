"""cross_entropy on CPU: C++ kernels for bf16 and fp32 logits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_lite.ops import native

if TYPE_CHECKING:
    from mindspeed_lite.ops.cross_entropy import Case

_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}

library = native.Library(
    Path(__file__).with_name("cpu.cpp"),
    {f"cross_entropy_statistics_{name}": "ppplllii" for name in _NAMES.values()}
    | {f"cross_entropy_gradient_{name}": "ppppppllli" for name in _NAMES.values()},
)


def supported(case: Case) -> list[str]:
    if case.dtype not in _NAMES:
        return [f"dtype {case.dtype}: the kernels take bfloat16 and float32"]
    reason = library.unusable()
    return [] if reason is None else [reason]


def statistics(rows: Tensor, target: Tensor, start: int, whole: bool) -> Tensor:
    count, width = rows.shape
    out = torch.empty(3, count, dtype=torch.float32)
    kernel = getattr(library, f"cross_entropy_statistics_{_NAMES[rows.dtype]}")
    threads = native.threads(rows.numel())
    kernel(rows, target, out, count, width, start, whole, threads)
    return out


def gradient(rows: Tensor, target: Tensor, start: int, statistics: Tensor, dloss: Tensor, out: Tensor) -> None:
    count, width = rows.shape
    kernel = getattr(library, f"cross_entropy_gradient_{_NAMES[rows.dtype]}")
    kernel(rows, target, *statistics, dloss, out, count, width, start, native.threads(rows.numel()))
