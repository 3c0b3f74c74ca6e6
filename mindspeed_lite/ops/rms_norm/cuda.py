"""rms_norm on CUDA: see `ops.norm_cuda`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_lite.ops import norm_cuda
from mindspeed_lite.ops.rms_norm import reference

if TYPE_CHECKING:
    from mindspeed_lite.ops.rms_norm import Case

_HAS_FUSED = hasattr(torch.ops.aten, "_fused_rms_norm")


def supported(case: Case) -> list[str]:
    reasons = norm_cuda.reasons(case)
    if not _HAS_FUSED and (not norm_cuda.HAS_TRITON or case.dtype == torch.float64):
        reasons.append(f"torch {torch.__version__} has no fused rms_norm kernel")
    return reasons


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, zero_centered: bool = False) -> Tensor:
    def by_torch(factor: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, factor, eps)

    def by_reference() -> Tensor:
        return reference.rms_norm(x, weight, eps, zero_centered)

    return norm_cuda.norm(
        "rms_norm", x, weight, None, eps, zero_centered, by_torch if _HAS_FUSED else None, by_reference
    )
