"""Which tokens a rank of context parallelism holds: two chunks of each sequence, mirrored."""

from __future__ import annotations

import torch


def partitioned_indices(cu_seqlens: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Places of this rank's tokens in a whole pack."""
    places = []
    for start, end in zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True):
        chunks = (
            torch.arange(start, end).chunk(2 * size) if end > start else [torch.empty(0, dtype=torch.long)] * 2 * size
        )
        places += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.cat(places)
