"""`--moe-permute-fusion`: tokens are permuted for their experts by one operator, without Transformer Engine.

Reaches the three functions that Megatron's dispatchers move tokens with, when they are asked for their fused form:
`permute`, `unpermute` and `sort_chunks_by_idxs`. Without the flag they sort all pairs of token and expert to find a
few, and add rows up one rounding at a time. The names that Megatron imports from Transformer Engine for the fused
form are supplied too, since its configuration refuses the flag where they are missing.

Steps aside for padding to the tile of a quantised product, which only Transformer Engine's form has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_lite.engine import Context, Feature, Option, Provide, Session, Wrap
from mindspeed_lite.ops import permute as ops

ARGUMENT = "moe_permute_fusion"
_UTILS = "megatron.core.transformer.moe.moe_utils"
# What TransformerConfig looks for.
_NAMES = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)


def _topk(tokens: Any, probs: Any, num_out_tokens: Any, drop_and_pad: bool) -> int | None:
    """How many experts each token has, where the caller knows it is the same number for all.

    Only the all-to-all dispatcher gives both probabilities and a plain number of rows, and only where nothing is
    dropped or padded; the others count rows on the device, or keep the part of the map that is their own.
    """
    rows = int(tokens.shape[0])
    if probs is None or drop_and_pad or not isinstance(num_out_tokens, int) or not rows or num_out_tokens % rows:
        return None
    return num_out_tokens // rows


def _permute(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def permute(
        tokens: Any,
        routing_map: Any,
        probs: Any = None,
        num_out_tokens: Any = None,
        fused: bool = False,
        drop_and_pad: bool = False,
        tokens_per_expert: Any = None,
        align_size: int = 0,
    ) -> Any:
        if not fused or (tokens_per_expert is not None and align_size > 0):
            return wrapped(
                tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad, tokens_per_expert, align_size
            )
        topk = _topk(tokens, probs, num_out_tokens, drop_and_pad)
        found = ops.permute(tokens, routing_map, probs, num_out_tokens, drop_and_pad, topk=topk)
        return *found, None, tokens_per_expert

    return permute


def _permute_of_three(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def permute(
        tokens: Any,
        routing_map: Any,
        probs: Any = None,
        num_out_tokens: Any = None,
        fused: bool = False,
        drop_and_pad: bool = False,
    ) -> Any:
        if not fused:
            return wrapped(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
        topk = _topk(tokens, probs, num_out_tokens, drop_and_pad)
        return ops.permute(tokens, routing_map, probs, num_out_tokens, drop_and_pad, topk=topk)

    return permute


def _unpermute(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def unpermute(
        permuted_tokens: Any,
        sorted_indices: Any,
        restore_shape: Any,
        probs: Any = None,
        routing_map: Any = None,
        fused: bool = False,
        drop_and_pad: bool = False,
        pad_offsets: Any = None,
    ) -> Any:
        given = (permuted_tokens, sorted_indices, restore_shape, probs, routing_map)
        if not fused or pad_offsets is not None:
            return wrapped(*given, fused, drop_and_pad, pad_offsets)
        return ops.unpermute(*given, drop_and_pad)

    return unpermute


def _unpermute_without_padding(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def unpermute(
        permuted_tokens: Any,
        sorted_indices: Any,
        restore_shape: Any,
        probs: Any = None,
        routing_map: Any = None,
        fused: bool = False,
        drop_and_pad: bool = False,
    ) -> Any:
        given = (permuted_tokens, sorted_indices, restore_shape, probs, routing_map)
        return ops.unpermute(*given, drop_and_pad) if fused else wrapped(*given, fused, drop_and_pad)

    return unpermute


def _sort_chunks(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def sort_chunks_by_idxs(
        input: Any, split_sizes: Any, sorted_idxs: Any, probs: Any = None, fused: bool = False
    ) -> Any:
        if not fused:
            return wrapped(input, split_sizes, sorted_idxs, probs, fused)
        return ops.sort_chunks(input, split_sizes, sorted_idxs, probs)

    return sort_chunks_by_idxs


def _supplied(session: Session) -> Callable[..., Any]:
    """What stands under the names of Transformer Engine's functions; the functions above leave nobody to call it."""

    def fused_form(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "--moe-permute-fusion: padding to the tile of a quantised product needs Transformer Engine's form of the "
            "permutation; train without fp8 and fp4 or leave the flag out."
        )

    return fused_form


def _why_not(context: Context) -> Sequence[str]:
    reasons = []
    if context.arg("transformer_impl", "local") == "transformer_engine":
        reasons.append("--transformer-impl transformer_engine has a permutation of its own")
    if context.host_args is not None and not context.arg("num_experts", None):
        reasons.append("--num-experts is not given: the model has no experts")
    return reasons


def _adjust(context: Context) -> Mapping[str, Any]:
    return {} if context.host_args is None else {ARGUMENT: True}


FEATURE = Feature(
    name="moe_permute_fusion",
    summary="tokens moved to their experts and back by one operator",
    options=(
        Option(
            "--moe-permute-fusion",
            help="Permute tokens for their experts with one fused operator.",
            upstream=">=0.16,<0.20",
        ),
    ),
    numerics="ulp",
    condition=_why_not,
    adjust=_adjust,
    operators=("permute",),
    patches=(
        Wrap(f"{_UTILS}:permute", _permute, versions=">=0.17"),
        Wrap(f"{_UTILS}:permute", _permute_of_three, versions="<0.17"),
        Wrap(f"{_UTILS}:unpermute", _unpermute, versions=">=0.17"),
        Wrap(f"{_UTILS}:unpermute", _unpermute_without_padding, versions="<0.17"),
        Wrap(f"{_UTILS}:sort_chunks_by_idxs", _sort_chunks),
        *(Provide(f"{_UTILS}:{name}", _supplied) for name in _NAMES),
    ),
)
