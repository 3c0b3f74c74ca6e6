"""Reference of permute and unpermute."""

from __future__ import annotations

import torch

from mindspeed_lite.ops.permute import rows


def permute(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None,
    count: int,
    capacity: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    pair = pairs(routing_map, count, capacity)  # [P]
    experts = routing_map.shape[1]
    row_ids = rows.of_pairs(pair, tokens.shape[0], experts)
    # Widened to sum the gradient in fp32.
    permuted = tokens.to(_wide(tokens.dtype)).index_select(0, pair // experts).to(tokens.dtype)
    return permuted, None if probs is None else probs.reshape(-1).index_select(0, pair), row_ids


def unpermute(
    permuted: torch.Tensor,
    row_ids: torch.Tensor,
    tokens: int,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor | None,
    drop_and_pad: bool,
) -> torch.Tensor:
    count, hidden = permuted.shape
    pair, order, offsets = rows.split(row_ids.long(), count)
    wide = permuted.to(_wide(permuted.dtype))
    if probs is not None:
        wide = wide * probs.reshape(-1).index_select(0, pair).to(wide.dtype).unsqueeze(-1)
    place = torch.arange(count, device=permuted.device)
    token = torch.searchsorted(offsets, place, right=True) - 1  # [P], in the order of tokens
    out = wide.new_zeros(tokens, hidden).index_add(0, token, wide.index_select(0, order))
    return out.to(permuted.dtype)


def pairs(routing_map: torch.Tensor, count: int, capacity: int | None) -> torch.Tensor:
    """Return token * E + expert for each permuted row, [P]."""
    tokens, experts = routing_map.shape
    by_expert = routing_map.t().to(torch.int8)  # [E, T]
    if capacity is None:
        # Unrouted pairs follow as padding.
        found = by_expert.reshape(-1).argsort(descending=True, stable=True)[:count]
        return found % max(tokens, 1) * experts + found // max(tokens, 1)
    token = by_expert.argsort(dim=-1, descending=True, stable=True)[:, :capacity]  # [E, capacity]
    return (token * experts + torch.arange(experts, device=token.device).unsqueeze(-1)).reshape(-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
