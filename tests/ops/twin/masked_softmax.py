"""npu_scaled_masked_softmax."""

from __future__ import annotations

import torch

from . import NPU_DTYPES


def npu_scaled_masked_softmax(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0, fixed_triu_mask: bool = False
) -> torch.Tensor:
    if x.dtype not in NPU_DTYPES or x.dim() != 4 or any(size % 32 or not 32 <= size <= 4096 for size in x.shape[2:]):
        raise ValueError(f"x {x.dtype} {tuple(x.shape)}")
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2:] != x.shape[2:]:
        raise ValueError(f"mask {mask.dtype} {tuple(mask.shape)} for x {tuple(x.shape)}")
    if any(size not in (1, wanted) for size, wanted in zip(mask.shape[:2], x.shape[:2], strict=True)):
        raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to {tuple(x.shape)}")
    if fixed_triu_mask:
        raise ValueError("fixed_triu_mask is documented as not implemented")
    # In which type it scales is not documented, nor what is left of a row in which everything is hidden.
    scores = (x * scale).float().masked_fill(mask, float("-inf"))
    return scores.softmax(-1).to(x.dtype)
