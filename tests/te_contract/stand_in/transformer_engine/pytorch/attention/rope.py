"""Rotary embedding."""

from __future__ import annotations

import torch

from ..positions import partitioned_indices


def _rotate(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool) -> torch.Tensor:
    turned, rest = t[..., : freqs.size(-1)].float(), t[..., freqs.size(-1) :]
    if interleaved:
        half = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        half = torch.cat([-second, first], -1)
    return torch.cat([(turned * freqs.cos() + half * freqs.sin()).to(t.dtype), rest], -1)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Turn pairs of values by angles [s, 1, 1, d]; a pack's sequences start at angle zero each."""
    freqs = freqs.float()
    if tensor_format == "sbhd":
        return _rotate(t, freqs[: t.size(0)], interleaved)
    if tensor_format == "bshd":
        return _rotate(t.transpose(0, 1), freqs[: t.size(1)], interleaved).transpose(0, 1)
    assert cu_seqlens is not None
    position = torch.cat([torch.arange(length) for length in cu_seqlens.diff().tolist()])
    if cp_size > 1:
        position = position[partitioned_indices(cu_seqlens, cp_size, cp_rank)]
    return _rotate(t, freqs[position].view(len(position), 1, -1), interleaved)
