"""Row ids: which (token, expert) pair each permuted row is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Parts of an int32 row id tensor.

    pair: [P], token * E + expert.
    order: [P], rows sorted by token, then expert.
    offsets: [T + 1], start of each token in `order`, and P.
    """

    pair: Tensor
    order: Tensor
    offsets: Tensor


def of_pairs(pair: Tensor, tokens: int, experts: int) -> Tensor:
    order = pair.argsort(stable=True)
    first = torch.arange(tokens + 1, dtype=pair.dtype, device=pair.device) * experts
    offsets = torch.searchsorted(pair[order], first)
    return torch.cat([pair, order, offsets]).to(torch.int32)


def size(rows: int, tokens: int) -> int:
    return 2 * rows + tokens + 1


def split(row_ids: Tensor, rows: int) -> Rows:
    return Rows(row_ids[:rows], row_ids[rows : 2 * rows], row_ids[2 * rows :])
