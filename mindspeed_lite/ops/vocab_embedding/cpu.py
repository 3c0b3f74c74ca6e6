"""vocab_embedding on CPU: looks up and sums gradients for local ids only.

Counting them needs no synchronisation. Saves two integers per local id.
"""

from __future__ import annotations

import torch
from torch import Tensor


def vocab_embedding(ids: Tensor, weight: Tensor, vocab_start: int = 0, sparse: bool = False) -> Tensor:
    local = ids.reshape(-1) - vocab_start
    place = ((local >= 0) & (local < weight.shape[0])).nonzero().squeeze(1)
    rows = torch.nn.functional.embedding(local.index_select(0, place), weight, sparse=sparse)
    out = rows.new_zeros(local.numel(), weight.shape[1]).index_copy_(0, place, rows)
    return out.view(*ids.shape, weight.shape[1])
