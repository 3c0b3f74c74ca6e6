"""npu_moe_token_permute_with_routing_map and _npu_moe_token_unpermute_with_routing_map."""

from __future__ import annotations

import torch


def npu_moe_token_permute_with_routing_map(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    count, experts = routing_map.shape
    out_tokens = count if num_out_tokens is None else num_out_tokens
    by_expert = routing_map.bool().t()
    if drop_and_pad:
        capacity = out_tokens // experts
        token = by_expert.int().argsort(dim=-1, descending=True, stable=True)[:, :capacity]
        expert = torch.arange(experts).unsqueeze(-1).expand(-1, capacity)
        sorted_indices = token.reshape(-1)
        permuted_probs = None if probs is None else probs[token, expert].reshape(-1)
        return tokens.index_select(0, sorted_indices), permuted_probs, sorted_indices.int()
    rows = torch.arange(count).expand(experts, -1).masked_select(by_expert)
    permuted_probs = None if probs is None else probs.t().masked_select(by_expert)
    return tokens.index_select(0, rows), permuted_probs, rows.argsort(stable=True).int()


def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: list[int],
    *,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    count, rows = restore_shape[0], permuted_tokens.shape[0]
    wide = permuted_tokens.float()
    index = sorted_indices.long()
    if drop_and_pad:
        if probs is not None:
            capacity = rows // probs.shape[1]
            wide = wide * probs[index, torch.arange(probs.shape[1]).repeat_interleave(capacity)].float().unsqueeze(-1)
        out = torch.zeros(restore_shape).index_add(0, index, wide)
        return out.to(permuted_tokens.dtype), *_for_backward(sorted_indices, probs)
    if probs is not None and routing_map is not None:
        wide = wide * probs.t().masked_select(routing_map.bool().t()).float().unsqueeze(-1)
    topk = rows // count
    token = torch.arange(rows) // topk
    out = torch.zeros(restore_shape).index_add(0, token, wide.index_select(0, index))
    return out.to(permuted_tokens.dtype), *_for_backward(sorted_indices, probs)


def _for_backward(
    sorted_indices: torch.Tensor, probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What the operator's own backward alone has a use for."""
    nothing = torch.full_like(sorted_indices, -1)
    return nothing, nothing, None if probs is None else probs.new_full(sorted_indices.shape, torch.nan)
