"""npu_scaled_masked_softmax."""

from __future__ import annotations

import torch


def npu_scaled_masked_softmax(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0, fixed_triu_mask: bool = False
) -> torch.Tensor:
    # In which type it scales is not documented, nor what is left of a row in which everything is hidden.
    scores = (x * scale).float().masked_fill(mask, float("-inf"))
    return scores.softmax(-1).to(x.dtype)
