"""The cross-entropy that operators and parallel losses are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lite.ops.rows import precision


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Differentiable loss over a whole vocabulary."""
    wide = logits.to(precision(logits.dtype))
    log_probs = wide.log_softmax(-1)  # [..., K]
    known = (target >= 0) & (target < logits.shape[-1])
    column = target.clamp(0, logits.shape[-1] - 1)[..., None].to(torch.int64)
    # Out-of-vocabulary target: loss as if the target were the likeliest token.
    picked = torch.where(known, log_probs.gather(-1, column)[..., 0], wide.detach().amax(-1) - wide.logsumexp(-1))
    return -picked


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(hidden @ weight.t(), target)
