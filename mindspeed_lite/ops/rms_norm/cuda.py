"""rms_norm on CUDA through the kernel that PyTorch fuses itself (forward and backward one launch each)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mindspeed_lite.ops.rms_norm import Case


def supported(case: Case) -> list[str]:
    reasons = []
    if not hasattr(torch.ops.aten, "_fused_rms_norm"):
        reasons.append(f"torch {torch.__version__} has no fused rms_norm kernel")
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        reasons.append(f"dtype {case.dtype}")
    if case.weight_dtype != case.dtype:
        reasons.append(f"weight is {case.weight_dtype} and x {case.dtype}: the fused kernel takes one dtype")
    if case.zero_centered and case.weight_dtype in (torch.float16, torch.bfloat16):
        reasons.append(f"1 + weight would be rounded to {case.weight_dtype} before the multiplication")
    return reasons


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, zero_centered: bool = False) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight + 1 if zero_centered else weight, eps)
