"""rms_norm on CPU: `ops.norm_cpu` for bf16 and fp32, the reference for other dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from mindspeed_lite.ops import norm_cpu
from mindspeed_lite.ops.rms_norm import reference
from mindspeed_lite.ops.traced import is_traced

if TYPE_CHECKING:
    from mindspeed_lite.ops.rms_norm import Case


def supported(case: Case) -> list[str]:
    if not case.dtype.is_floating_point:
        return [f"dtype {case.dtype}"]
    reason = norm_cpu.unusable() if norm_cpu.has_kernel(case.dtype, case.weight_dtype) else None
    return [] if reason is None else [reason]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, zero_centered: bool = False) -> Tensor:
    if is_traced(x) or x.numel() == 0 or not norm_cpu.has_kernel(x.dtype, weight.dtype):
        return reference.rms_norm(x, weight, eps, zero_centered)
    return norm_cpu.norm(x, weight, None, eps, zero_centered)
