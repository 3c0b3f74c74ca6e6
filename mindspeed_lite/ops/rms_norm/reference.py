"""Reference of rms_norm."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, zero_centered: bool = False) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = x.to(dtype)  # [..., H]
    scale = weight.to(dtype)  # [H]
    if zero_centered:
        scale = scale + 1
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)  # [..., 1]
    return (wide * rstd * scale).to(x.dtype)
