"""Reference moe_router in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

SOFTMAX = "softmax"
SIGMOID = "sigmoid"
SQRTSOFTPLUS = "sqrtsoftplus"
SCORE_FUNCTIONS = (SOFTMAX, SIGMOID, SQRTSOFTPLUS)
# Softmax over all experts before the choice; SOFTMAX is over the chosen logits.
PRE_SOFTMAX = "pre_softmax"

# Added to a sum of scores before division.
EPS = 1e-20


class Groups(NamedTuple):
    """`number` contiguous groups of experts; a token may use its `chosen` best.

    Groups rank by the sum of their `best` highest scores.
    """

    number: int
    chosen: int
    best: int


class Form(NamedTuple):
    """scores: PRE_SOFTMAX or a score function. scale: 1.0 for none. dense: results [T, topk], not [T, E].

    ordered: sorted torch.topk; Megatron, without groups, sorts only with gradients enabled. Not read inside
    autograd.Function.
    """

    scores: str
    topk: int
    groups: Groups | None = None
    scale: float = 1.0
    dense: bool = False
    ordered: bool = True

    @property
    def normalised(self) -> bool:
        """Whether the chosen scores are divided by their sum."""
        return self.scores in (SIGMOID, SQRTSOFTPLUS) and self.topk > 1


def precision(dtype: torch.dtype) -> torch.dtype:
    """Compute dtype: fp32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scores_of(logits: torch.Tensor, function: str) -> torch.Tensor:
    """Scores [T, E] in fp32 or float64."""
    dtype = precision(logits.dtype)
    if function in (SOFTMAX, PRE_SOFTMAX):
        return torch.softmax(logits, dim=-1, dtype=dtype)
    if function == SIGMOID:
        return torch.sigmoid(logits.to(dtype))
    return F.softplus(logits.to(dtype)).sqrt()


def choose(scores: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """The topk highest scores and their experts, [T, topk] each; ties as in torch.topk."""
    topk, groups = form.topk, form.groups
    if groups is None:
        return torch.topk(scores, topk, dim=1, sorted=form.ordered)
    tokens, experts = scores.shape
    grouped = scores.reshape(tokens, groups.number, experts // groups.number)  # [T, G, E / G]
    worth = grouped.topk(groups.best, dim=-1).values.sum(-1)  # [T, G]
    best = worth.topk(groups.chosen, dim=-1, sorted=False).indices
    closed = torch.ones_like(worth, dtype=torch.bool).scatter(1, best, False)
    return torch.topk(grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1), topk, dim=-1)


def topk_routing(
    logits: torch.Tensor, expert_bias: torch.Tensor | None, form: Form
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = precision(logits.dtype)
    if form.scores == SOFTMAX:
        chosen, indices = choose(logits, form)
        probs = torch.softmax(chosen, dim=-1, dtype=dtype)  # [T, topk]
    else:
        scores = scores_of(logits, form.scores)
        if expert_bias is None:
            probs, indices = choose(scores, form)
        else:
            _, indices = choose(scores + expert_bias.to(dtype), form)
            probs = scores.gather(1, indices)
        if form.normalised:
            probs = probs / (probs.sum(dim=-1, keepdim=True) + EPS)
    probs = (probs * form.scale).to(logits.dtype)
    if form.dense:
        return probs, indices
    return torch.zeros_like(logits).scatter(1, indices, probs), routing_map(logits, indices)


def routing_map(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[T, E] bool, True at `indices` [T, topk]."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)


def normalised_scores(logits: torch.Tensor, function: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores [T, E] that sum to 1 per row, and their divisors [T, 1] (None for softmax)."""
    scores = scores_of(logits, function)
    if function == SOFTMAX:
        return scores, None
    sums = scores.sum(dim=-1, keepdim=True) + EPS
    return scores / sums, sums


def aux_loss_scores(logits: torch.Tensor, topk: int, score_function: str) -> tuple[torch.Tensor, torch.Tensor]:
    scores, _ = normalised_scores(logits, score_function)
    return routing_map(logits, torch.topk(scores, topk, dim=1).indices), scores


def load_balancing_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    topk: int,
    num_experts: int,
    coeff: float,
) -> torch.Tensor:
    per_expert = probs.sum(dim=0, dtype=precision(probs.dtype))  # [E]
    factor = num_experts * coeff / (topk * total_num_tokens * total_num_tokens)
    loss: torch.Tensor = (per_expert * tokens_per_expert.to(per_expert.dtype)).sum() * factor
    return loss.to(per_expert.dtype)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"topk_routing": topk_routing, "aux_loss_scores": aux_loss_scores}


def moe_router(function: str, *arguments: Any) -> Any:
    return _FUNCTIONS[function](*arguments)
