"""Implementations that permute and unpermute is compared with; cases.py declares the cases."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed_lite.ops.case import Case, movable
from mindspeed_lite.ops.permute import permute, unpermute


def inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """Tokens, and probs that are 0 where a token does not go."""
    tokens, hidden, experts, _ = case.shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, hidden, generator=generator).to(case.device, case.torch_dtype)
    probs = torch.rand(tokens, experts, generator=generator).mul_(_routing_map(case))
    wide = torch.promote_types(case.torch_dtype, torch.float32)
    return x.requires_grad_(), probs.to(case.device, wide).requires_grad_()


def ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operators, one after the other."""
    tokens, hidden, _, topk = case.shape
    count, routes = tokens * topk, movable(_routing_map(case))

    def run(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        rows, _, row_ids = permute(x, routes(x), None, count, topk=topk)
        return unpermute(rows, row_ids, (tokens, hidden), probs, routes(x))

    return run


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """What Megatron writes."""
    tokens, hidden, _, topk = case.shape
    count, routes = tokens * topk, movable(_routing_map(case))

    def run(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        by_expert = routes(x).t().contiguous()
        token = by_expert.reshape(-1).argsort(descending=True, stable=True)[:count] % tokens
        rows = x.index_select(0, token) * probs.t().contiguous().masked_select(by_expert).unsqueeze(-1)
        sums = torch.zeros(tokens, hidden, dtype=rows.dtype, device=x.device)
        return sums.scatter_add(0, token.unsqueeze(1).expand(-1, hidden), rows).to(x.dtype)

    return run


def _routing_map(case: Case) -> torch.Tensor:
    tokens, _, experts, topk = case.shape
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(2)).topk(topk, 1).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
