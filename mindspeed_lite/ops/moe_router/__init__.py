"""Mixture-of-experts router: expert choice, routing probabilities and load-balancing loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.moe_router import reference
from mindspeed_lite.ops.moe_router.reference import PRE_SOFTMAX, SCORE_FUNCTIONS, SOFTMAX, Form, Groups

__all__ = [
    "OPERATOR",
    "SCORE_FUNCTIONS",
    "Case",
    "aux_loss_scores",
    "load_balancing_loss",
    "topk_routing",
]


class Case(NamedTuple):
    """Call properties that select a backend.

    form: None except for topk_routing. biased: has an expert_bias.
    """

    device: str
    dtype: torch.dtype
    function: str
    experts: int
    form: Form | None = None
    biased: bool = False


OPERATOR = Operator("moe_router", reference.moe_router)


def topk_routing(
    logits: torch.Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: torch.Tensor | None = None,
    dense_output: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The topk experts of every token and their probabilities.

    For logits x [T, E], with s the score that experts are chosen by and p the probability:
        softmax                      s = x,                  p = softmax of the chosen x
        softmax, use_pre_softmax     s = softmax(x),         p = s
        sigmoid                      s = sigmoid(x),         p = s / (sum of the chosen s + 1e-20), or s if topk is 1
        sqrtsoftplus                 s = sqrt(softplus(x)),  p as for sigmoid
    times scaling_factor, unless None or 0. expert_bias [E] is added to s for the choice only, without gradient; softmax
    ignores it. group_topk: choose within the group_topk of num_groups equal groups with the highest sums of their
    topk // group_topk highest s. Ties as in torch.topk on that device. Experts in descending order of s; unordered with
    gradients disabled.

    logits: any strides. Computed in fp32 (float64 for float64); p is rounded once. Returns
        dense_output False: probs [T, E] in the logits' dtype, 0 where not chosen; routing_map [T, E] bool;
        dense_output True: probs [T, topk]; indices [T, topk] int64.
    Backends save indices and [T, topk] fp32 values, with use_pre_softmax logits and indices.

    Raises ValueError for an unknown score function or unfit sizes.
    """
    _check(logits, topk, score_function)
    form = _form(
        logits.shape[1], topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, dense_output,
        torch.is_grad_enabled(),
    )  # fmt: skip
    bias = _bias(logits, expert_bias, score_function)
    implementation: Callable[..., Any] = OPERATOR.choose(_case(logits, form, bias))
    probs, chosen = implementation("topk_routing", logits, bias, form)
    return probs, chosen


def aux_loss_scores(logits: torch.Tensor, topk: int, score_function: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k of logits [T, E] without groups and bias, and scores that sum to 1 per token.

    Returns (routing_map, scores): [T, E] bool; [T, E] fp32 (float64 for float64): softmax(x), or s / (sum of all s +
    1e-20) for the scores s of `topk_routing`. Differentiable through the scores, which are saved with one fp32 value
    per token.

    Raises ValueError for an unknown score function or unfit topk.
    """
    _check(logits, topk, score_function)
    implementation: Callable[..., Any] = OPERATOR.choose(_aux_case(logits))
    chosen, scores = implementation("aux_loss_scores", logits, topk, score_function)
    return chosen, scores


def load_balancing_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    topk: int,
    num_experts: int,
    coeff: float,
) -> torch.Tensor:
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
    return reference.load_balancing_loss(probs, tokens_per_expert, total_num_tokens, topk, num_experts, coeff)


def _check(logits: torch.Tensor, topk: int, score_function: str) -> None:
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"moe_router: score_function is one of {', '.join(SCORE_FUNCTIONS)}, not {score_function!r}")
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"moe_router: want logits [T, E] of numbers, not {logits.dtype} {list(logits.shape)}")
    if not 1 <= topk <= logits.shape[1]:
        raise ValueError(f"moe_router: topk {topk} of {logits.shape[1]} experts")


@functools.lru_cache(maxsize=64)
def _form(
    experts: int,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    dense_output: bool,
    ordered: bool,
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
    return Form(scores, topk, groups, float(scaling_factor or 1.0), dense_output, ordered)


def _bias(logits: torch.Tensor, expert_bias: torch.Tensor | None, score_function: str) -> torch.Tensor | None:
    if expert_bias is None or score_function == SOFTMAX:
        return None
    if expert_bias.shape != logits.shape[1:]:
        raise ValueError(f"moe_router: want expert_bias {list(logits.shape[1:])}, not {list(expert_bias.shape)}")
    return expert_bias.detach()


def _case(logits: torch.Tensor, form: Form, bias: torch.Tensor | None) -> Case:
    return Case(logits.device.type, logits.dtype, "topk_routing", logits.shape[1], form, bias is not None)


def _aux_case(logits: torch.Tensor) -> Case:
    return Case(logits.device.type, logits.dtype, "aux_loss_scores", logits.shape[1])
