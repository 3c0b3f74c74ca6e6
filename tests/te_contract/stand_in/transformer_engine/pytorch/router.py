"""Choice of experts and its balance."""

from __future__ import annotations

import enum
from typing import Any

import torch

from ..recorded import recorded


class RoutingMapFormat(enum.IntEnum):
    """Storage of a routing map."""

    BYTEMAP = 0
    BITMAP_U8 = 1


def _scores(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    logits = logits.float()
    if score_function == "softmax":
        return logits.softmax(-1)
    if score_function == "sigmoid":
        return logits.sigmoid()
    if score_function == "sqrtsoftplus":
        return torch.nn.functional.softplus(logits).sqrt()
    raise ValueError(f"unknown score_function {score_function!r}")


def _chosen(scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> torch.Tensor:
    """Experts [tokens, topk]; with groups, of those whose best experts sum highest."""
    if num_groups and group_topk:
        groups = scores.view(len(scores), num_groups, -1)
        best = groups.topk(topk // group_topk, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
        is_open = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
        scores = groups.masked_fill(~is_open[..., None], float("-inf")).view_as(scores)
    return scores.topk(topk, dim=-1).indices


def _as_bytemap(indices: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, indices, True)


@recorded
def fused_topk_with_score_function(given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [tokens, experts], zero for experts not chosen, and the routing map."""
    if given.routing_map_format not in (RoutingMapFormat.BYTEMAP, "bytemap") or given.topk_indices is not None:
        raise RuntimeError("Transformer Engine's stand-in returns byte maps only")
    is_late_softmax = given.score_function == "softmax" and not given.use_pre_softmax
    scores = given.logits.float() if is_late_softmax else _scores(given.logits, given.score_function)
    ranked = scores if given.expert_bias is None else scores + given.expert_bias
    indices = _chosen(ranked.detach(), given.topk, given.num_groups, given.group_topk)
    values = scores.gather(-1, indices)
    if is_late_softmax:
        values = values.softmax(-1)
    elif given.score_function != "softmax" and given.topk > 1:
        values = values / (values.sum(-1, keepdim=True) + 1e-20)
    if given.scaling_factor:
        values = values * given.scaling_factor
    probs = torch.zeros_like(given.logits).scatter(-1, indices, values.to(given.logits.dtype))
    return probs, _as_bytemap(indices, given.logits)


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str, routing_map_format: Any = RoutingMapFormat.BYTEMAP
) -> tuple[torch.Tensor, torch.Tensor]:
    """The routing map without bias or groups, and scores fp32 of all experts."""
    scores = _scores(logits, score_function)
    if score_function != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return _as_bytemap(scores.detach().topk(topk, dim=-1).indices, logits), scores


@recorded
def fused_moe_aux_loss(given: Any) -> torch.Tensor:
    """The load balancing loss of Switch Transformers."""
    scale = given.num_experts * given.coeff / (given.topk * given.total_num_tokens * given.total_num_tokens)
    return (given.probs.float().sum(0) * given.tokens_per_expert).sum().mul(scale).to(given.probs.dtype)
