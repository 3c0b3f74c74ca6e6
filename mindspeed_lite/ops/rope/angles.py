"""Cached cos and sin of rotary angles, and positions in packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lite.ops.storage_cache import StorageVersionCache

__all__ = ["cos_sin", "packed_positions"]

_kept = StorageVersionCache()


def cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin in fp32 (float64 for float64), contiguous; cached until `angles` change."""

    def make() -> tuple[Tensor, Tensor]:
        wide = angles if angles.dtype == torch.float64 else angles.float()
        return wide.cos().contiguous(), wide.sin().contiguous()

    return make() if angles.requires_grad else _kept.get(angles, "cos and sin", make)


def packed_positions(cu_seqlens: Tensor, tokens: int, rows: int = -1, *, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """Position of each local token in its sequence, int64 [tokens]; no device synchronisation.

    cu_seqlens: [sequences + 1], cumulative lengths over all ranks. Context-parallel rank r holds pieces r and 2 *
    cp_size - 1 - r of 2 * cp_size. If `rows` of angles equals all tokens, positions do not restart. Tokens outside any
    sequence raise ValueError on CPU and get -1 elsewhere.
    """

    def make() -> Tensor:
        edges = cu_seqlens.long()
        lengths = (edges[1:] - edges[:-1]) // cp_size  # [sequences], of this rank's parts
        ends = lengths.cumsum(0)
        if cu_seqlens.device.type == "cpu" and int(lengths.sum()) != tokens:
            raise ValueError(f"rope: {tokens} tokens, but the sequences of cu_seqlens have {int(lengths.sum())}")
        token = torch.arange(tokens, device=cu_seqlens.device)
        index = torch.searchsorted(ends, token, right=True)  # first sequence ending after the token
        known = index < lengths.shape[0]
        index = index.clamp(max=lengths.shape[0] - 1)
        length = lengths[index]
        at = token - ends[index] + length
        if cp_size > 1:
            piece = length // 2
            at = at + torch.where(at < piece, cp_rank * piece, cp_size * length - (cp_rank + 2) * piece)
        at = at + torch.where(edges[-1] == rows, edges[index], 0)
        return torch.where(known, at, -1)

    return _kept.get(cu_seqlens, (tokens, rows, cp_size, cp_rank), make)
