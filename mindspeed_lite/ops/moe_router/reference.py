"""Reference moe_router in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_lite.ops.rows import precision

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
    """Options of the routing. scores: PRE_SOFTMAX or a score function; scale: 1.0 for none."""

    scores: str
    topk: int
    groups: Groups | None = None
    scale: float = 1.0

    @property
    def normalised(self) -> bool:
        """Whether the chosen scores are divided by their sum."""
        return self.scores in (SIGMOID, SQRTSOFTPLUS) and self.topk > 1


def scores_of(logits: Tensor, function: str) -> Tensor:
    """Scores [T, E] in fp32 or float64."""
    dtype = precision(logits.dtype)
    if function in (SOFTMAX, PRE_SOFTMAX):
        return torch.softmax(logits, dim=-1, dtype=dtype)
    if function == SIGMOID:
        return torch.sigmoid(logits.to(dtype))
    return F.softplus(logits.to(dtype)).sqrt()


def choose(scores: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """The topk highest scores and their experts, [T, topk] each; ties as in torch.topk."""
    topk, groups = form.topk, form.groups
    if groups is None:
        return torch.topk(scores, topk, dim=1)
    tokens, experts = scores.shape
    grouped = scores.reshape(tokens, groups.number, experts // groups.number)  # [T, G, E / G]
    worth = grouped.topk(groups.best, dim=-1).values.sum(-1)  # [T, G]
    best = worth.topk(groups.chosen, dim=-1, sorted=False).indices
    closed = torch.ones_like(worth, dtype=torch.bool).scatter(1, best, False)
    return torch.topk(grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1), topk, dim=-1)


def moe_router(logits: Tensor, expert_bias: Tensor | None, form: Form) -> tuple[Tensor, Tensor]:
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
    return torch.zeros_like(logits).scatter(1, indices, probs), routing_map(logits, indices)


def routing_map(logits: Tensor, indices: Tensor) -> Tensor:
    """[T, E] bool, True at `indices` [T, topk]."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)


def load_balancing_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, topk: int, num_experts: int, coeff: float
) -> Tensor:
    """coeff E / (topk N^2) sum_e f_e sum_t p_te, where f_e of N = total_num_tokens tokens went to e.

    probs: [T, E], this rank's scores; tokens_per_expert: [E], any dtype, without gradient, counted over N >= T tokens;
    N: int or tensor (never synchronises). Returns an fp32 scalar (float64 for float64), differentiable in probs; the
    gradient is one row expanded T times.
    """
    if probs.dim() != 2 or tokens_per_expert.shape != probs.shape[1:]:
        raise ValueError(
            f"moe_router: want probs [T, E] and tokens_per_expert [E], not {list(probs.shape)} and "
            f"{list(tokens_per_expert.shape)}"
        )
    per_expert = probs.sum(dim=0, dtype=precision(probs.dtype))  # [E]
    factor = num_experts * coeff / (topk * total_num_tokens * total_num_tokens)
    loss: Tensor = (per_expert * tokens_per_expert.to(per_expert.dtype)).sum() * factor
    return loss.to(per_expert.dtype)


def check(logits: Tensor, topk: int, score_function: str) -> None:
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"moe_router: score_function is one of {', '.join(SCORE_FUNCTIONS)}, not {score_function!r}")
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"moe_router: want logits [T, E] in floating point, not {logits.dtype} {list(logits.shape)}")
    if not 1 <= topk <= logits.shape[1]:
        raise ValueError(f"moe_router: topk {topk} of {logits.shape[1]} experts")
