"""Implementations that moe_router is compared with; cases.py declares the cases."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed_lite.ops.case import Case, movable
from mindspeed_lite.ops.moe_router import topk_routing


def inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """Logits, those of a token in another order each."""
    tokens, experts = case.shape[:2]
    places = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1)).argsort(dim=1)
    # Steps of a power of two through about [-2, 2], exact in any dtype up to 512 experts.
    logits = (places - experts // 2) * (4.0 / (1 << (experts - 1).bit_length()))
    return (logits.to(case.device, case.torch_dtype).requires_grad_(),)


def ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator's probabilities."""
    shape, bias = case.shape, _expert_bias(case)

    def run(logits: torch.Tensor) -> torch.Tensor:
        probs, _ = topk_routing(
            logits,
            shape.topk,
            use_pre_softmax=shape.pre,
            num_groups=shape.groups or None,
            group_topk=shape.chosen or None,
            score_function=shape.function,
            expert_bias=bias(logits),
        )
        return probs

    return run


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """What Megatron writes."""
    tokens, experts, topk, function, pre, groups, chosen, _ = case.shape
    bias = _expert_bias(case)

    def choose(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if groups:
            worth = scores.view(tokens, groups, -1).topk(topk // chosen, dim=-1)[0].sum(dim=-1)
            mask = torch.zeros_like(worth).scatter_(1, worth.topk(chosen, dim=-1, sorted=False)[1], 1)
            wide = mask.unsqueeze(-1).expand(tokens, groups, experts // groups).reshape(tokens, -1)
            scores = scores.masked_fill(~wide.bool(), float("-inf"))
        return torch.topk(scores, topk, dim=1)

    def run(logits: torch.Tensor) -> torch.Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        if function == "softmax" and pre:
            probs, indices = choose(torch.softmax(logits, dim=-1, dtype=wide))
        elif function == "softmax":
            scores, indices = choose(logits)
            probs = torch.softmax(scores, dim=-1, dtype=wide)
        else:
            x = logits.to(wide)
            scores = torch.sigmoid(x) if function == "sigmoid" else torch.nn.functional.softplus(x).sqrt()
            added = bias(logits)
            if added is None:
                probs, indices = choose(scores)
            else:
                indices = choose(scores + added)[1]
                probs = scores.gather(1, indices)
            if topk > 1:
                probs = probs / (probs.sum(dim=-1, keepdim=True) + 1e-20)
        probs = probs.type_as(logits)
        # The map that is wanted with the probabilities.
        torch.zeros_like(logits).int().scatter(1, indices, 1).bool()
        return torch.zeros_like(logits).scatter(1, indices, probs)

    return run


def _expert_bias(case: Case) -> Callable[[torch.Tensor], torch.Tensor | None]:
    if not case.shape.bias:
        return lambda logits: None
    order = torch.randperm(case.shape.experts, generator=torch.Generator().manual_seed(3))
    return movable(torch.linspace(-0.1, 0.1, case.shape.experts)[order])
