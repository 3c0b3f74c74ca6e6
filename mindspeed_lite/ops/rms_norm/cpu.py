"""rms_norm on CPU: `ops.norm_cpu` for bf16 and fp32, the reference for other dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from mindspeed_lite.ops import norm_cpu
from mindspeed_lite.ops.rms_norm import reference

if TYPE_CHECKING:
    from mindspeed_lite.ops.rms_norm import Case


def supported(case: Case) -> list[str]:
    return norm_cpu.reasons(case.dtype, case.weight_dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, zero_centered: bool = False) -> Tensor:
    if not norm_cpu.serves(x, weight):
        return reference.rms_norm(x, weight, eps, zero_centered)
    return norm_cpu.norm(x, weight, None, eps, zero_centered)
