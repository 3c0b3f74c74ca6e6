"""layer_norm on Ascend NPUs: PyTorch's operator.

A 16-bit `zero_centered` weight adds one rounding, of 1 + weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mindspeed_lite.ops.layer_norm import Case


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"dtype {case.dtype}: the kernel takes float16, bfloat16 and float32")
    if case.weight_dtype != case.dtype:
        reasons.append(f"weight is {case.weight_dtype} and x {case.dtype}: the kernel takes one dtype")
    return reasons


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, zero_centered: bool = False) -> Tensor:
    return torch.nn.functional.layer_norm(x, weight.shape, weight + 1 if zero_centered else weight, bias, eps)
