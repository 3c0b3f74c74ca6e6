"""Tensors seen as rows of their last dimension, for kernels that walk over rows at a fixed distance."""

from __future__ import annotations

import torch


def as_rows(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`t` [..., H] and the distance of its rows, in elements; the numbers of a row lie side by side.

    A copy only where no distance is common to all rows: heads cut out of a projection are taken as they lie.
    """
    width = t.shape[-1]
    if t.is_contiguous():
        return t, width
    rows = t.reshape(-1, width)
    if rows.stride(1) != 1:
        return rows.contiguous(), width
    return rows, rows.stride(0)
