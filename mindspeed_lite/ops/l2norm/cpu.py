"""l2norm on CPU as one pass over memory, summed in float64: without a compiler the reference serves."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mindspeed_lite.ops import native
from mindspeed_lite.ops.l2norm import reference

if TYPE_CHECKING:
    from mindspeed_lite.ops.l2norm import Case

_lib = native.Library(Path(__file__).with_name("cpu.cpp"), {"l2norm": "plipi"})


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype is None:
        reasons.append("tensors of several dtypes")
    elif case.dtype not in (torch.float32, torch.bfloat16):
        reasons.append(f"dtype {case.dtype}: the kernel takes float32 and bfloat16")
    if not case.contiguous:
        reasons.append("a tensor is not contiguous")
    unusable = _lib.unusable()
    if unusable is not None:
        reasons.append(unusable)
    return reasons


def l2norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return reference.l2norm(tensors)
    table, work = array("q"), 0
    for tensor in tensors:
        size = tensor.numel()
        work += size
        table.extend((tensor.data_ptr(), size))
    out = torch.empty((), dtype=torch.float32)
    _lib.l2norm(
        table.buffer_info()[0], len(tensors), tensors[0].dtype == torch.bfloat16, out.data_ptr(), native.threads(work)
    )
    return out
