"""layer_norm on CPU: `ops.norm_cpu` for bf16 and fp32, PyTorch for other dtypes.

PyTorch sums bf16 weight and bias gradients in bf16, so their error grows with the row count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_lite.ops import norm_cpu
from mindspeed_lite.ops.dispatch import report_fallback
from mindspeed_lite.ops.layer_norm import reference
from mindspeed_lite.ops.traced import is_traced

if TYPE_CHECKING:
    from mindspeed_lite.ops.layer_norm import Case


def supported(case: Case) -> list[str]:
    return [] if case.dtype.is_floating_point else [f"dtype {case.dtype}"]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, zero_centered: bool = False) -> Tensor:
    if is_traced(x) or x.numel() == 0:
        return reference.layer_norm(x, weight, bias, eps, zero_centered)
    if norm_cpu.has_kernel(x.dtype, weight.dtype):
        reason = norm_cpu.unusable()
        if reason is None:
            return norm_cpu.norm(x, weight, bias, eps, zero_centered)
        report_fallback("layer_norm", "cpu", (reason,), "PyTorch's own kernel")
    if zero_centered or weight.dtype != x.dtype:
        # PyTorch supports weights of x's dtype, and fp32 ones with 16-bit x.
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight, bias = weight.to(wide), bias.to(wide)
    return torch.nn.functional.layer_norm(x, weight.shape, weight + 1 if zero_centered else weight, bias, eps)
