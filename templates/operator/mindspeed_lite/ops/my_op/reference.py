"""The definition of my_op in plain PyTorch: what every backend is tested against."""

from __future__ import annotations

import torch


def my_op(x: torch.Tensor) -> torch.Tensor:
    """y = x * sigmoid(1.702 x), in x's dtype."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)  # [...]
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)
