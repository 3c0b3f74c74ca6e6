"""rms_norm on CUDA: PyTorch's fused kernels where they apply, else Triton.

Triton (`ops.norm_kernels`) takes rows too short for PyTorch's thread block, mixed dtypes, and 16-bit zero-centred
weights, where PyTorch would round 1 + weight.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from mindspeed_lite.ops.dispatch import report_fallback
from mindspeed_lite.ops.rms_norm import reference

if TYPE_CHECKING:
    from mindspeed_lite.ops.rms_norm import Case

# Row length too short for a thread block.
_SHORT = 256

_NARROW = (torch.float16, torch.bfloat16)
_FUSED = hasattr(torch.ops.aten, "_fused_rms_norm")
_TRITON = importlib.util.find_spec("triton") is not None


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype not in (*_NARROW, torch.float32, torch.float64):
        reasons.append(f"dtype {case.dtype}")
    if not _TRITON or torch.float64 in (case.dtype, case.weight_dtype):
        because = "without Triton" if not _TRITON else "in float64"
        if case.weight_dtype != case.dtype:
            reasons.append(f"weight is {case.weight_dtype} and x {case.dtype}: {because} they must have one dtype")
        if case.zero_centered and case.weight_dtype in _NARROW:
            reasons.append(f"{because} 1 + weight would be rounded to {case.weight_dtype} before the multiplication")
        if not _FUSED:
            reasons.append(f"torch {torch.__version__} has no fused rms_norm kernel")
    return reasons


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, zero_centered: bool = False) -> torch.Tensor:
    if _torch_serves(x, weight, zero_centered):
        return torch.nn.functional.rms_norm(x, weight.shape, weight + 1 if zero_centered else weight, eps)
    if torch.compiler.is_compiling() or x.numel() == 0:
        return reference.rms_norm(x, weight, eps, zero_centered)
    from mindspeed_lite.ops import norm_kernels

    if x.shape[-1] > norm_kernels.WIDEST:
        report_fallback("rms_norm", "cuda", (f"rows of more than {norm_kernels.WIDEST}",))
        return reference.rms_norm(x, weight, eps, zero_centered)
    out: torch.Tensor = norm_kernels.Norm.apply(x, weight, None, eps, zero_centered)  # type: ignore[no-untyped-call]
    return out


def _torch_serves(x: torch.Tensor, weight: torch.Tensor, zero_centered: bool) -> bool:
    return (
        x.dtype == weight.dtype
        and not (zero_centered and weight.dtype in _NARROW)
        and _FUSED
        and (x.shape[-1] > _SHORT or not _TRITON or x.dtype == torch.float64)
    )
