"""Stand-in for Transformer Engine's extension: the one function that Megatron calls by itself."""

from __future__ import annotations

import torch
from transformer_engine.pytorch.collectives import partitioned_indices


def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """Places of a rank's tokens in a whole pack."""
    return partitioned_indices(cu_seqlens, world_size, rank).int()
