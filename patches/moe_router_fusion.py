"""`--moe-router-fusion`: the router's scores, top-k and probabilities in one operator.

Reaches the fused forms of `topk_routing_with_score_function`, `compute_routing_scores_for_aux_loss` and
`switch_load_balancing_loss_func`. Choices equal Megatron's, ties included. Leaves inference's dense output alone. Falls
back for replayed or given routing, and before 0.18 for 16-bit logits, whose scores that release rounds before top-k.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mindspeed_lite.engine import Feature, Function, Option, Override, Session
from mindspeed_lite.ops import moe_router as ops

from ._shared import moe
from ._shared.conditions import turn_on
from ._shared.wrappers import config_field, is_set, verify

_ROUNDED = (
    "this release rounds the scores of 16-bit logits before it chooses, and the operator does not; "
    "--moe-router-dtype fp32 has nothing to round"
)
_CHOSEN = "the experts are chosen or recorded outside the router, which Megatron's own code does"


def _route(session: Session, plain: Function, fused: bool, why_not: str, logits: Any, topk: int, how: Any) -> Any:
    if fused and not why_not:
        functions = (lambda x: ops.topk_routing(x, topk, **how)[0], lambda x: plain(x, topk)[0])
        # Choices depend on rounding.
        verify(session, FEATURE, "topk_routing", *functions, {"logits": logits}, sizes_vary=True, widened=False)
        return ops.topk_routing(logits, topk, **how)
    if fused:
        session.fallback(FEATURE.name, why_not)
    return plain(logits, topk)


def _rounded(logits: Any, rounds: bool) -> str:
    """Reason for 16-bit logits in a release that `rounds` scores to their dtype."""
    return _ROUNDED if rounds and logits.dtype in (torch.bfloat16, torch.float16) else ""


def _topk(wrapped: Function, session: Session, rounds: bool = False) -> Function:
    def topk_routing_with_score_function(
        logits: Any,
        topk: int,
        use_pre_softmax: bool = False,
        num_groups: int | None = None,
        group_topk: int | None = None,
        scaling_factor: float | None = None,
        score_function: str = "softmax",
        expert_bias: Any = None,
        fused: bool = False,
        router_replay: Any = None,
        dense_output: bool = False,
        precomputed_indices: Any = None,
    ) -> Any:
        how = {
            "use_pre_softmax": use_pre_softmax,
            "num_groups": num_groups,
            "group_topk": group_topk,
            "scaling_factor": scaling_factor,
            "score_function": score_function,
            "expert_bias": expert_bias,
        }
        why_not = _CHOSEN
        if router_replay is None and precomputed_indices is None:
            why_not = _rounded(logits, rounds)
        rest = {"router_replay": router_replay, "precomputed_indices": precomputed_indices}
        plain = functools.partial(wrapped, **how, **rest, dense_output=dense_output)
        # Only inference asks for a dense output, in a compiled function.
        return _route(session, plain, fused and not dense_output, why_not, logits, topk, how)

    return topk_routing_with_score_function


def _aux_scores(wrapped: Function, session: Session, rounds: bool = False) -> Function:
    def compute_routing_scores_for_aux_loss(
        logits: Any, topk: int, score_function: str, fused: bool = False, padding_mask: Any = None
    ) -> Any:
        why_not = _rounded(logits, rounds)
        if not fused or why_not:
            if fused:
                session.fallback(FEATURE.name, why_not)
            return wrapped(logits, topk, score_function, False, padding_mask)
        given = (topk, score_function)
        functions = (lambda x: ops.aux_loss_scores(x, *given)[1], lambda x: wrapped(x, *given)[1])
        verify(session, FEATURE, "aux_loss_scores", *functions, {"logits": logits}, sizes_vary=True)
        routing_map, scores = ops.aux_loss_scores(logits, topk, score_function)
        if padding_mask is None:
            return routing_map, scores
        # True is a padding token.
        counts = (~padding_mask).unsqueeze(-1)
        return routing_map * counts, scores * counts

    return compute_routing_scores_for_aux_loss


def _aux_loss(wrapped: Function, session: Session) -> Function:
    def switch_load_balancing_loss_func(
        probs: Any,
        tokens_per_expert: Any,
        total_num_tokens: Any,
        topk: int,
        num_experts: int,
        moe_aux_loss_coeff: float,
        fused: bool = False,
        padding_mask: Any = None,
    ) -> Any:
        given = (tokens_per_expert, total_num_tokens, topk, num_experts, moe_aux_loss_coeff)
        if not fused:
            return wrapped(probs, *given, fused, padding_mask)
        if padding_mask is not None:
            # True is a token that counts.
            probs = probs * padding_mask.unsqueeze(-1)
        functions = (lambda x: ops.load_balancing_loss(x, *given), lambda x: wrapped(x, *given))
        verify(session, FEATURE, "load_balancing_loss", *functions, {"probs": probs}, sizes_vary=True)
        return ops.load_balancing_loss(probs, *given)

    return switch_load_balancing_loss_func


FEATURE = Feature(
    name="moe_router_fusion",
    summary="the router's scores, choice and probabilities by one operator",
    options=(Option("--moe-router-fusion", upstream=">=0.14"),),
    numerics="ulp",
    theme="experts",
    condition=moe.local_experts("has its own fused router, with this flag"),
    arguments=turn_on("moe_router_fusion"),
    operators=("moe_router",),
    unsupported={"<0.14": "Megatron's router has no function of its own for a fused form before 0.14"},
    patches=(
        Override(f"{moe.UTILS}:topk_routing_with_score_function", _topk, versions=">=0.18", by_name=True),
        Override(
            f"{moe.UTILS}:topk_routing_with_score_function",
            functools.partial(_topk, rounds=True),
            versions="<0.18",
            by_name=True,
        ),
        Override(f"{moe.UTILS}:compute_routing_scores_for_aux_loss", _aux_scores, versions=">=0.17"),
        Override(
            f"{moe.UTILS}:compute_routing_scores_for_aux_loss",
            functools.partial(_aux_scores, rounds=True),
            versions="<0.17",
            by_name=True,
        ),
        Override(f"{moe.UTILS}:switch_load_balancing_loss_func", _aux_loss, by_name=True),
        config_field("moe_router_fusion", is_set(f"{moe.UTILS}:fused_topk_with_score_function")),
    ),
)
