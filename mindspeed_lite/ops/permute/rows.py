"""Row ids: which pair of a token and an expert each permuted row is, seen from the rows and from the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """The parts of a tensor of row ids, int32 all of them: two numbers for each of P rows and one for each token.

    pair: [P], of each row token * E + expert, which is where its probability stands in [T, E].
    order: [P], the rows token by token, those of one token by expert.
    offsets: [T + 1], where each token's rows begin in `order`, and P.
    """

    pair: torch.Tensor
    order: torch.Tensor
    offsets: torch.Tensor


def of_pairs(pair: torch.Tensor, tokens: int, experts: int) -> torch.Tensor:
    """Row ids of rows whose pairs [P] are known."""
    order = pair.argsort(stable=True)
    first = torch.arange(tokens + 1, dtype=pair.dtype, device=pair.device) * experts
    offsets = torch.searchsorted(pair[order], first)
    return torch.cat([pair, order, offsets]).to(torch.int32)


def size(rows: int, tokens: int) -> int:
    """Numbers in the row ids of so many rows and tokens."""
    return 2 * rows + tokens + 1


def split(row_ids: torch.Tensor, rows: int) -> Rows:
    """The parts of `row_ids`, as views."""
    return Rows(row_ids[:rows], row_ids[rows : 2 * rows], row_ids[2 * rows :])
