"""moe_router with gradients: what the backends with a backward pass of their own share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops.moe_router.form import PRE_SOFTMAX, Form


class Routed(NamedTuple):
    """What a forward pass makes of the logits: the two results, the experts [T, topk], and what to keep of it.

    kept: [T, topk] fp32: the chosen scores, for SOFTMAX their softmax; None for PRE_SOFTMAX, whose logits are kept.
    """

    probs: torch.Tensor
    chosen: torch.Tensor
    indices: torch.Tensor
    kept: torch.Tensor | None


class Pass(NamedTuple):
    """A backend's two directions of topk_routing.

    forward(logits, expert_bias, form) -> Routed
    backward(dprobs, indices, kept, form, experts) -> dlogits [T, E] in the dtype of dprobs. kept is that of `Routed`,
    for PRE_SOFTMAX the logits. dprobs has any strides.
    """

    forward: Callable[[torch.Tensor, torch.Tensor | None, Form], Routed]
    backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Form, int], torch.Tensor]


class AuxPass(NamedTuple):
    """A backend's two directions of aux_loss_scores.

    forward(logits, topk, function) -> (routing_map, scores, sums), as `reference.normalised_scores` has the last two
    backward(dscores, scores, sums, function, dtype) -> dlogits in that dtype
    """

    forward: Callable[[torch.Tensor, int, str], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, str, torch.dtype], torch.Tensor]


def route(
    backend: Pass, logits: torch.Tensor, expert_bias: torch.Tensor | None, form: Form
) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_routing, recorded for the backward pass where one may follow."""
    if torch.is_grad_enabled() and logits.requires_grad:
        probs, chosen = _Route.apply(logits, expert_bias, form, backend)  # type: ignore[no-untyped-call]
        return probs, chosen
    routed = backend.forward(logits, expert_bias, form)
    return routed.probs, routed.chosen


def aux_scores(backend: AuxPass, logits: torch.Tensor, topk: int, function: str) -> tuple[torch.Tensor, torch.Tensor]:
    """aux_loss_scores, recorded for the backward pass where one may follow."""
    if torch.is_grad_enabled() and logits.requires_grad:
        chosen, scores = _AuxScores.apply(logits, topk, function, backend)  # type: ignore[no-untyped-call]
        return chosen, scores
    chosen, scores, _ = backend.forward(logits, topk, function)
    return chosen, scores


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, expert_bias: torch.Tensor | None, form: Form, backend: Pass
    ) -> tuple[torch.Tensor, torch.Tensor]:
        routed = backend.forward(logits, expert_bias, form)
        ctx.save_for_backward(routed.indices, logits if form.scores == PRE_SOFTMAX else routed.kept)
        ctx.form, ctx.backend, ctx.experts = form, backend, logits.shape[1]
        ctx.mark_non_differentiable(routed.chosen)
        ctx.set_materialize_grads(False)
        return routed.probs, routed.chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprobs: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, None, None, None]:
        if dprobs is None:
            return None, None, None, None
        indices, kept = ctx.saved_tensors
        return ctx.backend.backward(dprobs, indices, kept, ctx.form, ctx.experts), None, None, None


class _AuxScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, topk: int, function: str, backend: AuxPass
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, scores, sums = backend.forward(logits, topk, function)
        ctx.save_for_backward(scores, sums)
        ctx.function, ctx.backend, ctx.dtype = function, backend, logits.dtype
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)
        return chosen, scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, dscores: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if dscores is None:
            return None, None, None, None
        scores, sums = ctx.saved_tensors
        return ctx.backend.backward(dscores, scores, sums, ctx.function, ctx.dtype), None, None, None
