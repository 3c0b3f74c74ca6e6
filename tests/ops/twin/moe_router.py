"""npu_moe_gating_top_k and npu_moe_gating_top_k_softmax."""

from __future__ import annotations

import torch

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.no_grad()  # for inference
def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> Triple:
    (tokens, experts), size = x.shape, x.shape[1] // group_count
    wide = x.float()
    norm = wide.sigmoid() if norm_type else wide.softmax(-1)
    by = norm if bias is None else norm + bias.float()
    if group_count > 1:
        grouped = by.view(tokens, group_count, size)
        worth = grouped.amax(-1) if group_select_mode == 0 else grouped.topk(2, dim=-1).values.sum(-1)
        closed = torch.ones_like(worth, dtype=torch.bool).scatter(1, _first(worth, k_group), False)
        by = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).view(tokens, experts)
    indices = _first(by, k)
    y = norm.gather(1, indices)
    # Of the softmax one page divides these by their sum too, another does not.
    y = y / (y.sum(-1, keepdim=True) + eps) if norm_type == 1 else torch.full_like(y, float("nan"))
    out = norm if out_flag else torch.full_like(norm, float("nan"))
    return (y * routed_scaling_factor).to(x.dtype), indices.int(), out


@torch.no_grad()
def npu_moe_gating_top_k_softmax(x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1) -> Triple:
    probs = x.float().softmax(-1)
    indices = _first(probs, k)
    rows = torch.arange(indices.numel(), dtype=torch.int32).view(k, -1).t().reshape(indices.shape)
    return probs.gather(-1, indices).to(x.dtype), indices.int(), rows


def _first(x: torch.Tensor, k: int) -> torch.Tensor:
    """Where the k highest are; of equal ones the first."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]
