"""Attention from its definition, also of packs and of sequences that ranks share."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.distributed as dist

from ...recorded import keep, recorded
from ..collectives import Gather, partitioned_indices
from ..constants import CPLoadBalancingStrategy  # noqa: F401  a recorded default
from ..module.base import ExtraState


class DotProductAttention(ExtraState):
    """softmax(q k^T / sqrt(d)) v, without parameters."""

    @recorded
    def __init__(self, given: Any) -> None:
        super().__init__()
        if given.softmax_type != "vanilla" or given.softcap or given.return_max_logit:
            raise RuntimeError("Transformer Engine's stand-in neither caps, offsets nor returns logits")
        key_size = given.kv_channels if isinstance(given.kv_channels, int) else given.kv_channels[0]
        self.softmax_scale = 1 / math.sqrt(key_size) if given.softmax_scale is None else given.softmax_scale
        names = "num_attention_heads layer_number attention_type attention_dropout qkv_format attn_mask_type"
        keep(self, given, f"{names} window_size tp_group softmax_type")
        # Where the sequence is shared by tensor-parallel ranks, their dropout is the same.
        is_same = given.sequence_parallel or given.tp_size == 1
        self.get_rng_state_tracker = None if is_same else given.get_rng_state_tracker
        self.set_context_parallel_group(given.cp_group, given.cp_global_ranks, given.cp_stream, given.cp_comm_type)

    @recorded
    def set_context_parallel_group(self, given: Any) -> None:
        """The ranks that share sequences; a list is inner and outer groups."""
        keep(self, given, "cp_group cp_global_ranks cp_stream cp_comm_type")

    def _context(self) -> tuple[list[Any], int, int]:
        """Groups from the inner to the outer; their size and this rank in all."""
        groups = self.cp_group if isinstance(self.cp_group, list) else [self.cp_group] if self.cp_group else []
        size, rank = 1, 0
        for group in groups:
            rank += size * dist.get_rank(group)
            size *= dist.get_world_size(group)
        return groups, size, rank

    @recorded
    def forward(self, given: Any) -> Any:
        """Output [s, b, h * d] of sbhd, [b, s, h * d] of bshd, [t, h * d] of thd."""
        layout = given.qkv_format or self.qkv_format
        kind = given.attn_mask_type or self.attn_mask_type
        if given.core_attention_bias_type != "no_bias" or given.softcap:
            raise RuntimeError("Transformer Engine's stand-in neither caps logits nor adds to them")
        groups, size, rank = self._context()
        q, k, v = (
            x.transpose(0, 1) if layout == "sbhd" else x[None] if layout == "thd" else x
            for x in (given.query_layer, given.key_layer, given.value_layer)
        )
        lengths = given.cu_seqlens_q_padded if given.cu_seqlens_q_padded is not None else given.cu_seqlens_q
        q_at, k_at = torch.arange(q.size(1)), torch.arange(k.size(1))
        if size > 1:
            whole = lengths if layout == "thd" else torch.tensor([0, q.size(1) * size])
            q_at = partitioned_indices(whole, size, rank)
            k_at = torch.cat([partitioned_indices(whole, size, other) for other in range(size)])
            for group in groups:
                k, v = Gather.apply(k, group, 1), Gather.apply(v, group, 1)
        elif "bottom_right" in kind:
            q_at = q_at + k.size(1) - q.size(1)
        window = given.window_size or self.window_size or (-1, -1)
        is_hidden = self._hidden(kind, q_at, k_at, window)
        if layout == "thd":
            sequence = [torch.bucketize(at, lengths.to(at.device), right=True) for at in (q_at, k_at)]
            is_hidden = is_hidden | (sequence[0][:, None] != sequence[1][None, :])
        elif given.attention_mask is not None and ("padding" in kind or kind == "arbitrary"):
            # True is hidden; a pair is of queries and keys.
            mask = given.attention_mask
            is_hidden = is_hidden | (mask[1] if isinstance(mask, tuple) else mask)
        out = self._attend(q, k, v, is_hidden)
        return {"sbhd": out.transpose(0, 1), "thd": out[0]}.get(layout, out).flatten(-2).contiguous()

    @staticmethod
    def _hidden(kind: str, q_at: torch.Tensor, k_at: torch.Tensor, window: tuple[int, int]) -> torch.Tensor:
        distance = q_at[:, None] - k_at[None, :]
        is_hidden = torch.zeros_like(distance, dtype=torch.bool)
        if "causal" in kind:
            is_hidden |= distance < 0
        if window[0] >= 0:
            is_hidden |= distance > window[0]
        if window[1] >= 0:
            is_hidden |= -distance > window[1]
        return is_hidden

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_hidden: torch.Tensor) -> torch.Tensor:
        """Output [b, s, h, d]."""
        repeats = q.size(2) // k.size(2)
        k, v = (x.repeat_interleave(repeats, 2).transpose(1, 2) for x in (k, v))
        logits = (q.transpose(1, 2).float() @ k.transpose(-1, -2).float()) * self.softmax_scale
        # A row without keys, which padding makes, gives zeros.
        weights = logits.masked_fill(is_hidden, float("-inf")).softmax(-1).nan_to_num(0.0).to(v.dtype)
        if self.training and self.attention_dropout:
            tracker = self.get_rng_state_tracker
            with tracker().fork() if tracker else contextlib.nullcontext():
                weights = torch.nn.functional.dropout(weights, self.attention_dropout)
        return (weights @ v).transpose(1, 2)
