"""Rows of a tensor's last dimension, and the dtype that they are computed in."""

from __future__ import annotations

import torch
from torch import Tensor


def as_rows(t: Tensor) -> tuple[Tensor, int]:
    """`t` [..., H] as rows and their stride in elements; the last dimension is contiguous.

    Copies only if no stride fits.
    """
    width = t.shape[-1]
    if t.is_contiguous():
        return t, width
    rows = t.reshape(-1, width)
    if rows.stride(1) != 1:
        return rows.contiguous(), width
    return rows, rows.stride(0)


def precision(dtype: torch.dtype) -> torch.dtype:
    """fp32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
