"""Mixture-of-experts router: expert choice, routing probabilities and load-balancing loss."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.batch_invariant import CANN
from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.moe_router import reference
from mindspeed_lite.ops.moe_router.reference import (
    PRE_SOFTMAX,
    SCORE_FUNCTIONS,
    SOFTMAX,
    Form,
    Groups,
    load_balancing_loss,
)

__all__ = [
    "OPERATOR",
    "SCORE_FUNCTIONS",
    "Case",
    "aux_loss_scores",
    "load_balancing_loss",
    "topk_routing",
]


class Case(NamedTuple):
    """Call properties that select a backend."""

    device: str
    dtype: torch.dtype
    experts: int
    form: Form


_TOPK = "torch.topk chooses its algorithm, and with it the order of ties, by the number of rows"
OPERATOR = Operator(
    "moe_router",
    reference.moe_router,  # type: ignore[arg-type]  # two results
    batch_dependence={"reference": _TOPK, "cpu": "", "cuda": _TOPK, "npu": CANN},
)


def topk_routing(
    logits: Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The topk experts of every token and their probabilities.

    For logits x [T, E], with s the score that experts are chosen by and p the probability:
        softmax                      s = x,                  p = softmax of the chosen x
        softmax, use_pre_softmax     s = softmax(x),         p = s
        sigmoid                      s = sigmoid(x),         p = s / (sum of the chosen s + 1e-20), or s if topk is 1
        sqrtsoftplus                 s = sqrt(softplus(x)),  p as for sigmoid
    times scaling_factor, unless None or 0. expert_bias [E] is added to s for the choice only, without gradient; softmax
    ignores it. group_topk: choose within the group_topk of num_groups equal groups with the highest sums of their
    topk // group_topk highest s. Ties as in torch.topk on that device (on CUDA the first).

    logits: any strides. Computed in fp32 (float64 for float64); p is rounded once. Returns probs [T, E] in the logits'
    dtype, 0 where not chosen, and routing_map [T, E] bool.
    Backends save indices and [T, topk] fp32 values, with use_pre_softmax logits and indices.

    Raises ValueError for an unknown score function or unfit sizes.
    """
    reference.check(logits, topk, score_function)
    form = form_of(
        logits.shape[1], topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function,
    )  # fmt: skip
    bias = _bias(logits, expert_bias, score_function)
    route: Any = OPERATOR.choose(Case(logits.device.type, logits.dtype, logits.shape[1], form), logits)
    probs, chosen = route(logits, bias, form)
    return probs, chosen


def aux_loss_scores(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """Top-k of logits [T, E] without groups and bias, and scores that sum to 1 per token.

    Returns (routing_map, scores): [T, E] bool; [T, E] fp32 (float64 for float64): softmax(x), or s / (sum of all s +
    1e-20) for the scores s of `topk_routing`. Differentiable through the scores.

    Raises ValueError for an unknown score function or unfit topk.
    """
    reference.check(logits, topk, score_function)
    scores = reference.scores_of(logits, score_function)
    if score_function != SOFTMAX:
        scores = scores / (scores.sum(dim=-1, keepdim=True) + reference.EPS)
    if logits.device.type == "cuda":
        return topk_routing(scores.detach(), topk)[1], scores
    # torch_npu's operators choose by a softmax or sigmoid of their own.
    return reference.routing_map(logits, torch.topk(scores, topk, dim=1).indices), scores


@functools.lru_cache(maxsize=64)
def form_of(
    experts: int,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None = None,
    score_function: str = SOFTMAX,
) -> Form:
    groups = None
    if group_topk:
        best = topk // group_topk
        if not num_groups or experts % num_groups or not group_topk <= num_groups:
            raise ValueError(f"moe_router: {group_topk} of {num_groups} groups of {experts} experts")
        size = experts // num_groups
        if not 1 <= best <= size or topk > group_topk * size:
            raise ValueError(
                f"moe_router: {topk} experts out of {group_topk} groups of {size}: want at least one of each group, "
                f"and no more than there are"
            )
        groups = Groups(num_groups, group_topk, best)
    scores = PRE_SOFTMAX if use_pre_softmax and score_function == SOFTMAX else score_function
    return Form(scores, topk, groups, float(scaling_factor or 1.0))


def _bias(logits: Tensor, expert_bias: Tensor | None, score_function: str) -> Tensor | None:
    if expert_bias is None or score_function == SOFTMAX:
        return None
    if expert_bias.shape != logits.shape[1:]:
        raise ValueError(f"moe_router: want expert_bias {list(logits.shape[1:])}, not {list(expert_bias.shape)}")
    return expert_bias.detach()
