"""rms_norm and layer_norm on Ascend NPUs: torch_npu's fused operator with its own backward; PyTorch's layer_norm.

They need one dtype for x and weight: a 16-bit `zero_centered` weight adds one rounding, of 1 + weight.
"""

from __future__ import annotations

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from mindspeed_lite.ops.norm import Case

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supported(case: Case) -> list[str]:
    if case.weight_dtype == case.dtype:
        return []
    return [f"weight is {case.weight_dtype} and x {case.dtype}: the kernel takes one dtype"]


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    scale = weight + 1 if zero_centered else weight
    if bias is not None:
        return torch.nn.functional.layer_norm(x, weight.shape, scale, bias, eps)
    # Documented for 2 to 8 dimensions.
    rows = x if 2 <= x.dim() <= 8 else x.reshape(-1, x.shape[-1])  # [..., H]
    y: Tensor = torch_npu.npu_rms_norm(rows, scale, epsilon=eps)[0]
    return y.view(x.shape)
