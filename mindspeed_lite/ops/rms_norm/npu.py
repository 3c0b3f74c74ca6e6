"""rms_norm on Ascend NPUs: torch_npu's fused operator, with its own backward.

It needs one dtype for x and weight: a 16-bit `zero_centered` weight adds one rounding, of 1 + weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

if TYPE_CHECKING:
    from mindspeed_lite.ops.rms_norm import Case


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"dtype {case.dtype}: npu_rms_norm takes float16, bfloat16 and float32")
    if case.weight_dtype != case.dtype:
        reasons.append(f"weight is {case.weight_dtype} and x {case.dtype}: npu_rms_norm takes one dtype")
    return reasons


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, zero_centered: bool = False) -> Tensor:
    # Documented for 2 to 8 dimensions.
    rows = x if 2 <= x.dim() <= 8 else x.reshape(-1, x.shape[-1])  # [..., H]
    y: Tensor = torch_npu.npu_rms_norm(rows, weight + 1 if zero_centered else weight, epsilon=eps)[0]
    return y.view(x.shape)
