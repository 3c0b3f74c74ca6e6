"""Permutation of tokens to experts and back.

A row_id_map int32 [tokens, 2 * experts + 1] of the stand-in holds, for each expert, the row of the token's copy or -1;
the other columns are not used. Callers hand it back as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from ..recorded import recorded


def _rows(routing_map: torch.Tensor) -> torch.Tensor:
    """Row of each token's copy for each expert, expert by expert in the order of tokens; -1 for none."""
    chosen = routing_map.bool()
    within = chosen.long().cumsum(0) - 1
    counts = chosen.sum(0)
    return torch.where(chosen, within + counts.cumsum(0) - counts, -1)


def _as_map(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, rows.size(1) + 1), value=-1).int()


def _by_expert(row_id_map: torch.Tensor) -> torch.Tensor:
    return row_id_map[:, : row_id_map.size(1) // 2].long()


def _take(inp: torch.Tensor, rows: torch.Tensor, total: int) -> torch.Tensor:
    """Rows [total, h] of copies of tokens; zero where no token goes."""
    token, expert = (rows >= 0).nonzero(as_tuple=True)
    return inp.new_zeros(total, *inp.shape[1:]).index_copy(0, rows[token, expert], inp[token])


def _take_probs(probs: torch.Tensor, rows: torch.Tensor, total: int) -> torch.Tensor:
    token, expert = (rows >= 0).nonzero(as_tuple=True)
    return probs.new_zeros(total).index_copy(0, rows[token, expert], probs[token, expert])


def moe_permute(
    inp: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of tokens, expert by expert, and the map back."""
    if map_type != "mask":
        raise ValueError("map_type should be mask with Transformer Engine's stand-in")
    rows = _rows(routing_map)
    return _take(inp, rows, num_out_tokens), _as_map(rows)


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of tokens with their probabilities, expert by expert, and the map back."""
    rows = _rows(routing_map)
    return _take(inp, rows, num_out_tokens), _take_probs(probs, rows, num_out_tokens), _as_map(rows)


@recorded
def moe_unpermute(given: Any) -> torch.Tensor:
    """Sums of the copies of each token, weighted by `merging_probs`."""
    if given.map_type != "mask" or given.pad_offsets is not None:
        raise ValueError("map_type should be mask, without padding, with Transformer Engine's stand-in")
    probs = given.probs if given.probs is not None else given.merging_probs
    rows = _by_expert(given.row_id_map)
    token, expert = (rows >= 0).nonzero(as_tuple=True)
    copies = given.inp[rows[token, expert]].float()
    if probs is not None:
        copies = copies * probs[token, expert].float()[:, None]
    shape = given.restore_shape if given.restore_shape is not None else (rows.size(0), given.inp.size(-1))
    return copies.new_zeros(shape).index_add(0, token, copies).to(given.inp.dtype)


def _order_of_chunks(split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    chunks = torch.arange(int(split_sizes.sum())).split(split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """Chunks of rows in another order."""
    return inp[_order_of_chunks(split_sizes, sorted_index)]


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks of rows and their probabilities in another order."""
    order = _order_of_chunks(split_sizes, sorted_index)
    return inp[order], probs[order]
