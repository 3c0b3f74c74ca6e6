"""The definition of layer_norm in plain PyTorch: what every backend is tested against."""

from __future__ import annotations

from typing import Any

import torch


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-5,
    zero_centered: bool = False,
    residual: torch.Tensor | None = None,
) -> Any:
    """y = (s - mean(s)) / sqrt(var(s) + eps) * (1 + weight if zero_centered else weight) + bias, in x's dtype.

    s is x, or x + residual; with `residual` (y, s) is returned.
    """
    total = x if residual is None else x + residual  # [..., H]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = total.to(dtype)  # [..., H]
    scale = weight.to(dtype)  # [H]
    if zero_centered:
        scale = scale + 1
    centred = wide - wide.mean(-1, keepdim=True)  # [..., H]
    rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)  # [..., 1]
    y = (centred * rstd * scale + bias.to(dtype)).to(x.dtype)
    return y if residual is None else (y, total)
