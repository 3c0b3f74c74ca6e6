"""layer_norm on CPU: `ops.norm_cpu` for bf16 and fp32, the reference for other dtypes.

PyTorch sums bf16 weight and bias gradients in bf16, so their error grows with the row count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from mindspeed_lite.ops import norm_cpu
from mindspeed_lite.ops.layer_norm import reference

if TYPE_CHECKING:
    from mindspeed_lite.ops.layer_norm import Case


def supported(case: Case) -> list[str]:
    return norm_cpu.reasons(case.dtype, case.weight_dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, zero_centered: bool = False) -> Tensor:
    if not norm_cpu.serves(x, weight):
        return reference.layer_norm(x, weight, bias, eps, zero_centered)
    return norm_cpu.norm(x, weight, bias, eps, zero_centered)
