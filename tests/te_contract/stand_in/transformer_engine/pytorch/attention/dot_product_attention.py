"""Attention from its definition, also of packs and of sequences that ranks share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..constants import CPLoadBalancingStrategy
from ..distributed import Gather
from ..module.base import ExtraState
from ..positions import partitioned_indices


class DotProductAttention(ExtraState):
    """softmax(q k^T / sqrt(d)) v, without parameters but for a learnable softmax."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        key_size = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1 / math.sqrt(key_size) if softmax_scale is None else softmax_scale
        self.num_attention_heads, self.layer_number, self.attention_type = (
            num_attention_heads,
            layer_number,
            attention_type,
        )
        self.attention_dropout, self.qkv_format, self.attn_mask_type = attention_dropout, qkv_format, attn_mask_type
        self.window_size, self.softcap, self.return_max_logit = window_size, softcap, return_max_logit
        # Where the sequence is shared by tensor-parallel ranks, their dropout is the same.
        self.get_rng_state_tracker = None if sequence_parallel or tp_size == 1 else get_rng_state_tracker
        self.tp_group, self.softmax_type = tp_group, softmax_type
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(1, num_attention_heads // tp_size, 1, 1))

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
        load_balancing_strategy: Any = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
    ) -> None:
        """The ranks that share sequences; a list is inner and outer groups."""
        self.cp_group, self.cp_global_ranks, self.cp_stream = cp_group, cp_global_ranks, cp_stream
        self.cp_comm_type = cp_comm_type

    def _context(self) -> tuple[list[Any], int, int]:
        """Groups from the inner to the outer; their size and this rank in all."""
        groups = self.cp_group if isinstance(self.cp_group, list) else [self.cp_group] if self.cp_group else []
        size, rank = 1, 0
        for group in groups:
            rank += size * dist.get_rank(group)
            size *= dist.get_world_size(group)
        return groups, size, rank

    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> Any:
        """Output [s, b, h * d] of sbhd, [b, s, h * d] of bshd, [t, h * d] of thd."""
        assert query_layer is not None and key_layer is not None and value_layer is not None
        layout = qkv_format or self.qkv_format
        kind = attn_mask_type or self.attn_mask_type
        groups, size, rank = self._context()
        q, k, v = (
            x.transpose(0, 1) if layout == "sbhd" else x[None] if layout == "thd" else x
            for x in (query_layer, key_layer, value_layer)
        )
        lengths = cu_seqlens_q_padded if cu_seqlens_q_padded is not None else cu_seqlens_q
        q_at, k_at = torch.arange(q.size(1)), torch.arange(k.size(1))
        if size > 1:
            whole = lengths if layout == "thd" else torch.tensor([0, q.size(1) * size])
            assert whole is not None
            q_at = partitioned_indices(whole, size, rank)
            k_at = torch.cat([partitioned_indices(whole, size, other) for other in range(size)])
            for group in groups:
                k, v = Gather.apply(k, group, 1), Gather.apply(v, group, 1)
        elif "bottom_right" in kind:
            q_at = q_at + k.size(1) - q.size(1)
        window = window_size or self.window_size or (-1, -1)
        is_hidden = self._hidden(kind, q_at, k_at, window)
        if layout == "thd":
            assert lengths is not None
            sequence = [torch.bucketize(at, lengths.to(at.device), right=True) for at in (q_at, k_at)]
            is_hidden = is_hidden | (sequence[0][:, None] != sequence[1][None, :])
        elif attention_mask is not None and ("padding" in kind or kind == "arbitrary"):
            is_hidden = is_hidden | self._padding(attention_mask)
        bias = core_attention_bias if core_attention_bias_type == "post_scale_bias" else None
        out, largest = self._attend(q, k, v, is_hidden, softcap or self.softcap, bias)
        out = {"sbhd": out.transpose(0, 1), "thd": out[0]}.get(layout, out).flatten(-2).contiguous()
        return (out, largest) if self.return_max_logit else out

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

    @staticmethod
    def _padding(mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Hidden keys [b, 1, q or 1, k]; True is hidden, as in the masks given."""
        return mask[1] if isinstance(mask, tuple) else mask

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_hidden: torch.Tensor, softcap: float, bias: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [b, s, h, d] and the largest logit of each head."""
        repeats = q.size(2) // k.size(2)
        k, v = (x.repeat_interleave(repeats, 2).transpose(1, 2) for x in (k, v))
        logits = (q.transpose(1, 2).float() @ k.transpose(-1, -2).float()) * self.softmax_scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if bias is not None:
            logits = logits + bias
        logits = logits.masked_fill(is_hidden, float("-inf"))
        largest = logits.detach().amax((0, 2, 3))
        if self.softmax_type != "vanilla":
            offset = self.softmax_offset if self.softmax_type == "learnable" else logits.new_zeros(1, 1, 1, 1)
            logits = torch.cat([offset.expand(*logits.shape[:-1], 1).to(logits.dtype), logits], -1)
        # A row without keys, which padding makes, gives zeros.
        weights = logits.softmax(-1).nan_to_num(0.0)[..., -k.size(2) :].to(v.dtype)
        if self.training and self.attention_dropout:
            tracker = self.get_rng_state_tracker
            with tracker().fork() if tracker else contextlib.nullcontext():
                weights = torch.nn.functional.dropout(weights, self.attention_dropout)
        return (weights @ v).transpose(1, 2), largest
