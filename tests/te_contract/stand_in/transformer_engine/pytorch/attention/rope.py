"""Rotary embedding."""

from __future__ import annotations

from typing import Any

import torch

from ...recorded import recorded
from ..collectives import partitioned_indices


def _rotate(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool) -> torch.Tensor:
    turned, rest = t[..., : freqs.size(-1)].float(), t[..., freqs.size(-1) :]
    if interleaved:
        half = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        half = torch.cat([-second, first], -1)
    return torch.cat([(turned * freqs.cos() + half * freqs.sin()).to(t.dtype), rest], -1)


@recorded
def apply_rotary_pos_emb(given: Any) -> torch.Tensor:
    """Turn pairs of values by angles [s, 1, 1, d]; a pack's sequences start at angle zero each."""
    t, freqs = given.t, given.freqs.float()
    if given.tensor_format == "sbhd":
        return _rotate(t, freqs[: t.size(0)], given.interleaved)
    if given.tensor_format == "bshd":
        return _rotate(t.transpose(0, 1), freqs[: t.size(1)], given.interleaved).transpose(0, 1)
    position = torch.cat([torch.arange(length) for length in given.cu_seqlens.diff().tolist()])
    if given.cp_size > 1:
        position = position[partitioned_indices(given.cu_seqlens, given.cp_size, given.cp_rank)]
    return _rotate(t, freqs[position].view(len(position), 1, -1), given.interleaved)
