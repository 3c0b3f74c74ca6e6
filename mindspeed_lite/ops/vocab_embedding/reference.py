"""vocab_embedding in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def vocab_embedding(ids: Tensor, weight: Tensor, vocab_start: int = 0, sparse: bool = False) -> Tensor:
    local = ids.contiguous() - vocab_start
    row = local.remainder(weight.shape[0])  # unchanged for local ids
    out = torch.nn.functional.embedding(row, weight, sparse=sparse)  # [..., H]
    return out.masked_fill_((row != local)[..., None], 0.0)
