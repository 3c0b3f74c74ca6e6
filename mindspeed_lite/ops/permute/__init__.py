"""MoE token permutation and its inverse, and reordering of row chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.batch_invariant import CANN, TORCH
from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.permute import reference, rows
from mindspeed_lite.ops.permute.chunks import sort_chunks

__all__ = ["OPERATOR", "Case", "permute", "sort_chunks", "unpermute"]

_MOST_PAIRS = 2**31  # row ids are int32
_MOST_SORTED = 2**24 - 1
_MOST_OF_A_TOKEN = 512


class Case(NamedTuple):
    device: str
    dtype: torch.dtype
    probs_dtype: torch.dtype | None
    uniform: bool
    """Whether all tokens have equally many rows by the caller's word, or all experts by drop_and_pad; in unpermute,
    whether the row ids come from such a call of a backend with row ids of its own."""
    large: bool
    """Whether tokens, experts or rows are too many to be sorted as fp32 numbers, or a token has 512 experts."""


OPERATOR = Operator(
    "permute",
    reference.permute,  # type: ignore[arg-type]  # three results
    batch_dependence={"reference": TORCH, "cpu": "", "cuda": "", "npu": CANN},
)


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | Tensor | None = None,
    drop_and_pad: bool = False,
    *,
    topk: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(permuted, permuted_probs, row_ids): one token copy per routed pair, sorted by expert.

    tokens: [T, H] floating point; routing_map: [T, E] bool; probs: [T, E], any dtype. permuted: [P, H], tokens
    ascending within an expert; permuted_probs: [P]; row_ids: for `unpermute`.

    P is `num_out_tokens`, or the number of routed pairs (synchronises). A smaller P drops the last pairs, a larger one
    adds unrouted pairs by expert. With `drop_and_pad` each expert has num_out_tokens // E rows: its first tokens, then
    its first unrouted ones.

    Differentiable in tokens and probs; token gradients are summed in fp32 (float64 for float64), rounded once. Saves
    two int32 per row and one per token.

    topk: every token has exactly topk experts and P is T * topk. torch_npu needs this; checking would synchronise.

    Raises ValueError, also for 2^31 pairs, or a capacity above T or without num_out_tokens.
    """
    if tokens.dim() != 2 or routing_map.dim() != 2 or routing_map.shape[0] != tokens.shape[0]:
        raise ValueError(
            f"permute: want tokens [T, H] and routing_map [T, E], not {_shape(tokens)} and {_shape(routing_map)}"
        )
    if probs is not None and probs.shape != routing_map.shape:
        raise ValueError(f"permute: want probs of routing_map's shape {_shape(routing_map)}, not {_shape(probs)}")
    count, experts = tokens.shape[0], routing_map.shape[1]
    if count * experts >= _MOST_PAIRS:
        raise ValueError(f"permute: {count} tokens times {experts} experts are more pairs than row ids can count")
    if routing_map.dtype != torch.bool:
        routing_map = routing_map.bool()
    size, capacity = _size(routing_map, num_out_tokens, drop_and_pad)
    if topk is not None and not drop_and_pad and size != count * topk:
        raise ValueError(f"permute: {count} tokens with {topk} experts each do not make {size} rows")
    case = _case(tokens, probs, max(size, count, experts), drop_and_pad or topk is not None, topk)
    implementation = reference.permute if size == 0 or tokens.numel() == 0 else OPERATOR.choose(case, tokens)
    result: tuple[Tensor, Tensor | None, Tensor]
    result = implementation(tokens, routing_map, probs, size, capacity)  # type: ignore[assignment]
    return result


def unpermute(
    permuted: Tensor,
    row_ids: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> Tensor:
    """[T, H]: sum of each token's rows, weighted by its pairs' probs if given.

    permuted: [P, H], any H; row_ids, routing_map, drop_and_pad: from `permute`; restore_shape: (T, H); probs: [T, E],
    needs routing_map [T, E].

    Sums in expert order in fp32 (float64 for float64), rounded once; deterministic. Differentiable in permuted and
    probs. Saves row_ids, probs, and permuted if probs need a gradient. Raises ValueError.
    """
    if permuted.dim() != 2 or len(restore_shape) != 2 or restore_shape[1] != permuted.shape[1]:
        raise ValueError(
            f"unpermute: want permuted [P, H] and restore_shape (T, H), not {_shape(permuted)} and "
            f"{tuple(restore_shape)}"
        )
    if probs is not None and (routing_map is None or probs.shape != routing_map.shape):
        other = "no map" if routing_map is None else _shape(routing_map)
        raise ValueError(f"unpermute: want probs [T, E] with a routing_map of this shape, not {_shape(probs)}, {other}")
    if probs is not None and probs.shape[0] != restore_shape[0]:
        raise ValueError(f"unpermute: probs {_shape(probs)} are not those of {restore_shape[0]} tokens")
    tokens, size = restore_shape[0], permuted.shape[0]
    own = row_ids.numel() == size
    if not own and row_ids.numel() != rows.size(size, tokens):
        raise ValueError(f"unpermute: row_ids {_shape(row_ids)} are not those of {size} rows and {tokens} tokens")
    arguments = (permuted, row_ids, tokens, probs, routing_map, drop_and_pad)
    if permuted.numel() == 0 and not own:
        return reference.unpermute(*arguments)
    module: Any = OPERATOR.module(_case(permuted, probs, max(size, tokens), own, None), permuted)
    if own and not getattr(module, "OWN_ROW_IDS", False):
        raise ValueError("unpermute: row_ids are those of another backend")
    out: Tensor = module.unpermute(*arguments)
    return out


def _size(routing_map: Tensor, num_out_tokens: int | Tensor | None, drop_and_pad: bool) -> tuple[int, int | None]:
    tokens, experts = routing_map.shape
    if not drop_and_pad:
        size = int(routing_map.sum() if num_out_tokens is None else num_out_tokens)
        if size < 0:
            raise ValueError(f"permute: num_out_tokens is {size}")
        return min(size, tokens * experts), None
    if num_out_tokens is None:
        raise ValueError("permute: drop_and_pad wants num_out_tokens, which says the capacity")
    capacity = int(num_out_tokens) // max(experts, 1)
    if not 0 <= capacity <= tokens:
        raise ValueError(f"permute: a capacity of {capacity} for {tokens} tokens")
    return capacity * experts, capacity


def _case(x: Tensor, probs: Tensor | None, largest: int, uniform: bool, topk: int | None) -> Case:
    large = largest >= _MOST_SORTED or (topk or 0) >= _MOST_OF_A_TOKEN
    return Case(x.device.type, x.dtype, None if probs is None else probs.dtype, uniform, large)


def _shape(t: Tensor) -> str:
    return str(tuple(t.shape))
