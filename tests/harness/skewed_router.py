"""A router whose loads are known: the first half of the experts has a multiple of the tokens of the other half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# Added to the logits of the experts that are to be chosen.
_AHEAD = 30.0


def chosen(weights: Sequence[float], tokens: int, topk: int) -> torch.Tensor:
    """[tokens, experts] bool: `topk` different experts for each token, in proportion to the weights.

    Systematic sampling: an expert's share of the line from 0 to topk is its weight's, and a token takes the experts at
    topk points of distance 1. The first points of tokens are spread evenly.

    Raises:
        ValueError: a weight of more than one point a token.
    """
    shares = torch.tensor(weights, dtype=torch.float64) * topk / sum(weights)
    if shares.max() > 1:
        raise ValueError("an expert would be chosen twice")
    first = (torch.arange(tokens, dtype=torch.float64) * 0.6180339887498949) % 1.0
    points = first.unsqueeze(1) + torch.arange(topk)
    expert = torch.searchsorted(shares.cumsum(0), points, right=True).clamp(max=len(shares) - 1)
    return torch.zeros(tokens, len(shares), dtype=torch.bool).scatter_(1, expert, True)


def weights_of(skew: float, experts: int) -> list[float]:
    return [skew] * (experts // 2) + [1.0] * (experts - experts // 2)


def install(skew: float) -> Callable[[], None]:
    """Let Megatron's router choose so; returns what undoes it. Probabilities and their gradients follow its logits."""
    from megatron.core.transformer.moe.router import TopKRouter

    own = TopKRouter.gating

    def gating(self: Any, input: torch.Tensor) -> torch.Tensor:
        logits = own(self, input)
        rows = logits.view(-1, logits.shape[-1])
        ahead = chosen(weights_of(skew, rows.shape[1]), len(rows), self.topk).to(logits.device)
        return logits + _AHEAD * ahead.view_as(logits).to(logits.dtype)

    TopKRouter.gating = gating
    return lambda: setattr(TopKRouter, "gating", own)
