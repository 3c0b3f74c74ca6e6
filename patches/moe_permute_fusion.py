"""`--moe-permute-fusion`: permute tokens for their experts by one operator.

Reaches the fused forms of `permute`, `unpermute` and `sort_chunks_by_idxs`. Provides names that Megatron imports from
Transformer Engine, or its configuration refuses the flag. Raises for padding to a quantized GEMM's tile, which only
Transformer Engine has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_lite.engine import Feature, Function, Option, Override, Provide, Session
from mindspeed_lite.ops import permute as ops
from mindspeed_lite.ops.permute import reference

from ._shared import moe
from ._shared.conditions import turn_on
from ._shared.wrappers import config_field, is_set, placeholder, verify

# Imports that TransformerConfig checks.
# Called only to pad for fp8 or fp4.
_PADDING = (
    "moe_permute_fusion: padding to the tile of a quantised product needs Transformer Engine's form of the "
    "permutation: train without fp8 and fp4, or leave --moe-permute-fusion out."
)
_NAMES = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)


def _topk(tokens: Any, probs: Any, num_out_tokens: Any, drop_and_pad: bool) -> int | None:
    """Experts per token, if all tokens are known to have as many.

    Only the all-to-all dispatcher gives both probabilities and a plain row count, and only without dropping and
    padding.
    """
    rows = int(tokens.shape[0])
    if probs is None or drop_and_pad or not isinstance(num_out_tokens, int) or not rows or num_out_tokens % rows:
        return None
    return num_out_tokens // rows


def _permuted(session: Session, plain: Function, call: moe.Permutation) -> Any:
    if not call.fused:
        return None
    tokens, routing_map, probs, num_out_tokens, _, drop_and_pad = call
    rest = {"num_out_tokens": num_out_tokens, "drop_and_pad": drop_and_pad}
    topk = _topk(tokens, probs, num_out_tokens, drop_and_pad)

    def ours(tokens: Any, probs: Any) -> Any:
        return ops.permute(tokens, routing_map, probs, topk=topk, **rest)

    def theirs(tokens: Any, probs: Any) -> Any:
        return plain(tokens, routing_map, probs, **rest)

    _verify(session, "permute", lambda x: ours(x, None)[0], lambda x: theirs(x, None)[0], {"tokens": tokens})
    if probs is not None:
        rows = tokens.detach()
        of_rows = (lambda p: ours(rows, p)[1], lambda p: theirs(rows, p)[1])
        _verify(session, "permute", *of_rows, {"probs": probs}, variant="probabilities")
    return ours(tokens, probs)


def _verify(session: Session, *what: Any, **more: Any) -> None:
    verify(session, FEATURE, *what, sizes_vary=True, **more)


def _unpermuted(session: Session, given: Sequence[Any], drop_and_pad: bool) -> Any:
    permuted_tokens, sorted_indices, restore_shape, probs, routing_map = given

    def ours(x: Any, probs: Any = None) -> Any:
        return ops.unpermute(x, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)

    def definition(x: Any, probs: Any = None) -> Any:
        return reference.unpermute(x, sorted_indices, restore_shape[0], probs, routing_map, drop_and_pad)

    # Megatron's function cannot read the operator's row ids.
    inputs = {"permuted_tokens": permuted_tokens, **({} if probs is None else {"probs": probs})}
    _verify(session, "unpermute", ours, definition, inputs, against="the sums in plain PyTorch")
    return ours(permuted_tokens, probs)


def _unpermute(wrapped: Function, session: Session) -> Function:
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
        return _unpermuted(session, given, drop_and_pad)

    return unpermute


def _sort_chunks(wrapped: Function, session: Session) -> Function:
    def sort_chunks_by_idxs(
        input: Any, split_sizes: Any, sorted_idxs: Any, probs: Any = None, fused: bool = False
    ) -> Any:
        if not fused:
            return wrapped(input, split_sizes, sorted_idxs, probs, fused)
        order = (split_sizes, sorted_idxs)
        functions = (lambda x: ops.sort_chunks(x, *order)[0], lambda x: wrapped(x, *order)[0])
        _verify(session, "sort_chunks", *functions, {"input": input})
        return ops.sort_chunks(input, split_sizes, sorted_idxs, probs)

    return sort_chunks_by_idxs


FEATURE = Feature(
    name="moe_permute_fusion",
    summary="tokens moved to their experts and back by one operator",
    options=(Option("--moe-permute-fusion", upstream=">=0.12"),),
    numerics="ulp",
    theme="experts",
    condition=moe.local_experts("has its own permutation, with this flag"),
    arguments=turn_on("moe_permute_fusion"),
    operators=("permute",),
    patches=(
        *moe.permute_patches(_permuted),
        Override(f"{moe.UTILS}:unpermute", _unpermute, by_name=True),
        Override(f"{moe.UTILS}:sort_chunks_by_idxs", _sort_chunks),
        *(Provide(f"{moe.UTILS}:{name}", placeholder(_PADDING)) for name in _NAMES),
        config_field("moe_permute_fusion", is_set(f"{moe.UTILS}:fused_permute")),
    ),
)
