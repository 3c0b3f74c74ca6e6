"""Autograd of moe_router around a backend's forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mindspeed_lite.ops import autograd
from mindspeed_lite.ops.moe_router.reference import PRE_SOFTMAX, Form


class Routed(NamedTuple):
    """Results of a forward pass: the two outputs, the experts [T, topk], and saved values.

    kept: [T, topk] fp32 chosen scores, for SOFTMAX their softmax; None for PRE_SOFTMAX, which saves logits.
    """

    probs: torch.Tensor
    chosen: torch.Tensor
    indices: torch.Tensor
    kept: torch.Tensor | None


class Pass(NamedTuple):
    """A backend's topk_routing.

    forward(logits, expert_bias, form) -> Routed
    backward(dprobs, indices, kept, form, experts) -> dlogits [T, E] in dprobs' dtype; kept: `Routed.kept`, or logits
    for PRE_SOFTMAX; dprobs: any strides.
    """

    forward: Callable[[torch.Tensor, torch.Tensor | None, Form], Routed]
    backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Form, int], torch.Tensor]


class AuxPass(NamedTuple):
    """A backend's aux_loss_scores.

    forward(logits, topk, function) -> (routing_map, scores, sums), the last two as in `reference.normalised_scores`
    backward(dscores, scores, sums, function, dtype) -> dlogits in that dtype
    """

    forward: Callable[[torch.Tensor, int, str], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, str, torch.dtype], torch.Tensor]


def route(
    backend: Pass, logits: torch.Tensor, expert_bias: torch.Tensor | None, form: Form
) -> tuple[torch.Tensor, torch.Tensor]:
    def forward(inputs: Any, _: None) -> tuple[tuple[torch.Tensor, ...], autograd.Inputs]:
        routed = backend.forward(inputs[0], expert_bias, form)
        kept = inputs[0] if form.scores == PRE_SOFTMAX else routed.kept
        return (routed.probs, routed.chosen), (routed.indices, kept)

    def backward(dprobs: torch.Tensor, saved: Any, _: None, wanted: Sequence[bool]) -> autograd.Inputs:
        indices, kept = saved
        return (backend.backward(dprobs, indices, kept, form, experts),)

    experts = logits.shape[1]
    probs, chosen = autograd.apply(autograd.Kernel(forward, backward), (logits,))
    return probs, chosen


def aux_scores(backend: AuxPass, logits: torch.Tensor, topk: int, function: str) -> tuple[torch.Tensor, torch.Tensor]:
    def forward(inputs: Any, _: None) -> tuple[tuple[torch.Tensor, ...], autograd.Inputs]:
        chosen, scores, sums = backend.forward(inputs[0], topk, function)
        return (scores, chosen), (scores, sums)

    def backward(dscores: torch.Tensor, saved: Any, _: None, wanted: Sequence[bool]) -> autograd.Inputs:
        scores, sums = saved
        return (backend.backward(dscores, scores, sums, function, dtype),)

    dtype = logits.dtype
    scores, chosen = autograd.apply(autograd.Kernel(forward, backward), (logits,))
    return chosen, scores
