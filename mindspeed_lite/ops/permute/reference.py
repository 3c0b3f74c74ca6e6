"""Reference of permute and unpermute."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lite.ops.permute import rows
from mindspeed_lite.ops.rows import precision


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, count: int, capacity: int | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    pair = pairs(routing_map, count, capacity)  # [P]
    experts = routing_map.shape[1]
    row_ids = rows.of_pairs(pair, tokens.shape[0], experts)
    # Widened to sum the gradient in fp32.
    permuted = tokens.to(precision(tokens.dtype)).index_select(0, pair // experts).to(tokens.dtype)
    return permuted, None if probs is None else probs.reshape(-1).index_select(0, pair), row_ids


def unpermute(
    permuted: Tensor, row_ids: Tensor, tokens: int, probs: Tensor | None, routing_map: Tensor | None, drop_and_pad: bool
) -> Tensor:
    count, hidden = permuted.shape
    pair, order, offsets = rows.split(row_ids.long(), count)
    wide = permuted.to(precision(permuted.dtype))
    if probs is not None:
        wide = wide * probs.reshape(-1).index_select(0, pair).to(wide.dtype).unsqueeze(-1)
    place = torch.arange(count, device=permuted.device)
    token = torch.searchsorted(offsets, place, right=True) - 1  # [P], in the order of tokens
    out = wide.new_zeros(tokens, hidden).index_add(0, token, wide.index_select(0, order))
    return out.to(permuted.dtype)


def pairs(routing_map: Tensor, count: int, capacity: int | None) -> Tensor:
    """token * E + expert of each row [P]."""
    tokens, experts = routing_map.shape
    by_expert = routing_map.t().to(torch.int8)  # [E, T]
    if capacity is None:
        # Unrouted pairs follow as padding.
        found = by_expert.reshape(-1).argsort(descending=True, stable=True)[:count]
        return found % max(tokens, 1) * experts + found // max(tokens, 1)
    token = by_expert.argsort(dim=-1, descending=True, stable=True)[:, :capacity]  # [E, capacity]
    return (token * experts + torch.arange(experts, device=token.device).unsqueeze(-1)).reshape(-1)
