"""`mindspeed_lite.ops.permute` on npu_moe_token_permute_with_routing_map and its inverse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_lite.ops import permute as operators
from tests.npu_contract.definitions import DTYPES, Call, Make, OperatorCall, Tensor, by_name, is_tensor

T, E, H = 6, 4, 32


def _there_and_back(
    dtype: str = "bfloat16", probs: str | None = "float32", topk: int = 2, capacity: int | None = None
) -> OperatorCall:
    """T tokens of H values: `topk` of E experts for each, or `capacity` tokens for each expert."""

    def call(make: Make) -> Any:
        x = make(T, H, dtype=dtype)
        routed = make.of((torch.arange(E) - torch.arange(T)[:, None]) % E < topk)
        weights = None if probs is None else make(T, E, dtype=probs)
        drops, known = ((True,), {}) if capacity else ((), {"topk": topk})
        count = T * topk if capacity is None else E * capacity
        rows, row_probs, row_ids = operators.permute(x, routed, weights, count, *drops, **known)
        return rows, row_probs, operators.unpermute(rows, row_ids, torch.Size([T, H]), weights, routed, *drops)

    return call


CALLS = {
    "float16": _there_and_back("float16", "float16"),
    "float16 and wider probs": _there_and_back("float16"),
    "float32 and narrower probs": _there_and_back("float32", "bfloat16"),
    "one expert for each token, without probs": _there_and_back(probs=None, topk=1),
    "capacity": _there_and_back(capacity=3),
    "capacity without probs": _there_and_back(probs=None, capacity=2),
    "as many rows as tokens": _there_and_back(capacity=T),
}


# ---- what is documented ----


def permute(call: Call) -> Iterator[str]:
    """npu_moe_token_permute_with_routing_map(tokens, routing_map, *, probs=, num_out_tokens=, drop_and_pad=)

    -> permuted, permuted probs (None without probs), sorted_indices
    """
    a = call.arguments
    tokens, routing_map, probs, rows = a["tokens"], a["routing_map"], a["probs"], a["num_out_tokens"]
    yield from by_name(call, "probs", "num_out_tokens", "drop_and_pad")
    yield from _dtypes("tokens", tokens, probs)
    if tokens.dim != 2 or routing_map.dim != 2 or routing_map.shape[0] != tokens.shape[0]:
        yield f"tokens {tokens} and routing_map {routing_map} do not fit: want [T, H] and [T, E]"
        return
    yield from _map(routing_map, probs)
    count, experts = routing_map.shape
    each = experts if a["drop_and_pad"] else count
    if not isinstance(rows, int) or not 0 <= rows <= count * experts or rows % each:
        yield f"num_out_tokens is {rows}: want a multiple of {each} up to {count * experts}"
        return
    if not a["drop_and_pad"] and routing_map.content is not None:
        counts = {sum(row) for row in routing_map.content}
        if counts != {rows // count}:
            yield f"tokens have {sorted(counts)} experts: want {rows // count} for each"
    if call.results is not None:
        yield from is_tensor("result 0 (permuted)", call.results[0], tokens.dtype, (rows, tokens.shape[1]))
        if probs is not None:
            yield from is_tensor("result 1 (permuted probs)", call.results[1], probs.dtype, (rows,))
        yield from is_tensor("result 2 (sorted_indices)", call.results[2], "int32", (rows,))


def permute_grad(call: Call) -> Iterator[str]:
    """npu_moe_token_permute_with_routing_map_grad(permuted_token_out_grad, probs_grad, sorted_indices, routing_map,
    experts_num, tokens_num, drop_and_pad) -> d tokens, d probs"""
    a = call.arguments
    gradient, routing_map = a["permuted_token_out_grad"], a["routing_map"]
    yield from is_tensor("sorted_indices", a["sorted_indices"], "int32", gradient.shape[:1])
    if (a["tokens_num"], a["experts_num"]) != routing_map.shape:
        yield f"{a['tokens_num']} tokens and {a['experts_num']} experts for a map {routing_map}"
    if call.results is not None:
        wanted = (a["tokens_num"], gradient.shape[1])
        yield from is_tensor("result 0 (d tokens)", call.results[0], gradient.dtype, wanted)
        if a["probs_grad"] is not None:
            yield from is_tensor("result 1 (d probs)", call.results[1], a["probs_grad"].dtype, routing_map.shape)


def unpermute(call: Call) -> Iterator[str]:
    """_npu_moe_token_unpermute_with_routing_map(permuted_tokens, sorted_indices, restore_shape, *, probs=,
    routing_map=, drop_and_pad=) -> tokens, and three for the backward pass"""
    a = call.arguments
    permuted, probs, routing_map = a["permuted_tokens"], a["probs"], a["routing_map"]
    yield from by_name(call, "probs", "routing_map", "drop_and_pad")
    yield from _dtypes("permuted_tokens", permuted, probs)
    yield from is_tensor("sorted_indices", a["sorted_indices"], "int32", permuted.shape[:1])
    shape = list(a["restore_shape"])
    if permuted.dim != 2 or len(shape) != 2 or shape[1] != permuted.shape[1]:
        yield f"restore_shape is {shape} for permuted_tokens {permuted}: want [T, H]"
        return
    if probs is not None and routing_map is None:
        yield "probs without their routing_map"
    elif routing_map is not None:
        yield from _map(routing_map, probs)
        each = routing_map.shape[1 if a["drop_and_pad"] else 0]
        if routing_map.shape[0] != shape[0] or permuted.shape[0] % each:
            yield f"{permuted.shape[0]} rows of {shape[0]} tokens do not fit the map {routing_map}"
    if call.results is not None:
        yield from is_tensor("result 0", call.results[0], permuted.dtype, tuple(shape))


def unpermute_grad(call: Call) -> Iterator[str]:
    """npu_moe_token_unpermute_with_routing_map_grad(unpermuted_tokens_grad, out_index, permuted_token_id, routing_map,
    permuted_tokens, probs, drop_and_pad, restore_shape) -> d permuted_tokens, d probs"""
    a = call.arguments
    gradient, rows = a["unpermuted_tokens_grad"], a["out_index"].shape
    yield from is_tensor("out_index", a["out_index"], "int32", rows)
    yield from is_tensor("permuted_token_id", a["permuted_token_id"], "int32", rows)
    if list(gradient.shape) != list(a["restore_shape"]):
        yield f"unpermuted_tokens_grad is {gradient}: want restore_shape {a['restore_shape']}"
    if call.results is not None:
        yield from is_tensor("result 0 (d permuted)", call.results[0], gradient.dtype, (*rows, gradient.shape[1]))


def _dtypes(name: str, x: Tensor, probs: Tensor | None) -> Iterator[str]:
    if x.dtype not in DTYPES:
        yield f"{name} is {x.dtype}: want one of {', '.join(DTYPES)}"
    if probs is not None and probs.dtype != x.dtype and (x.dtype, probs.dtype) != ("bfloat16", "float32"):
        yield f"probs are {probs.dtype} and {name} {x.dtype}: want one dtype, or float32 with bfloat16"


def _map(routing_map: Tensor, probs: Tensor | None) -> Iterator[str]:
    if routing_map.dtype not in ("bool", "int8"):
        yield f"routing_map is {routing_map.dtype}: want bool or int8"
    if probs is not None and probs.shape != routing_map.shape:
        yield f"probs {probs} are not of the map's shape {list(routing_map.shape)}"


CONTRACTS = {
    "npu_moe_token_permute_with_routing_map": permute,
    "npu_moe_token_permute_with_routing_map_grad": permute_grad,
    "_npu_moe_token_unpermute_with_routing_map": unpermute,
    "npu_moe_token_unpermute_with_routing_map_grad": unpermute_grad,
}
