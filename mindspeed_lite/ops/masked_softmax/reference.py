"""Reference of masked_softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lite.ops.rows import precision

# Value of Megatron's attention_mask_func.
HIDDEN = -10000.0


def masked_softmax(scores: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    wide = scores.to(precision(scores.dtype)) * scale
    queries, keys = scores.shape[-2:]
    if causal and queries > 1:
        key = torch.arange(keys, device=scores.device)
        later = key > torch.arange(queries, device=scores.device)[:, None]  # [sq, sk]
        mask = later if mask is None else mask | later
    if mask is not None:
        wide = wide.masked_fill(mask, HIDDEN)
    return wide.softmax(-1).to(scores.dtype)
