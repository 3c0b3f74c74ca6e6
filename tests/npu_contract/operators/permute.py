"""`mindspeed_lite.ops.permute` on npu_moe_token_permute_with_routing_map and its inverse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.npu_contract.definitions import DTYPES, ContractCase, Mutation, Tensors, by_name, is_tensor
from tests.npu_contract.recorder import Call, Tensor

T, E, H = 6, 4, 32


@dataclass(frozen=True)
class _Permutation(ContractCase):
    """T tokens of H values and E experts: topk of them for each token, or `capacity` tokens for each of them."""

    name: str
    dtype: str = "bfloat16"
    probs: str | None = "float32"
    topk: int = 2
    capacity: int | None = None

    operator = "permute"

    @property
    def rows(self) -> int:
        return T * self.topk if self.capacity is None else E * self.capacity

    @property
    def given(self) -> tuple[str, str | None]:
        """The dtypes that are handed over: one, or bfloat16 with float32 probs."""
        if self.probs in (None, self.dtype) or (self.dtype, self.probs) == ("bfloat16", "float32"):
            return self.dtype, self.probs
        return "float32", "float32"

    def leaves(self, device: str) -> Tensors:
        dtype = getattr(torch, self.dtype)
        size = (T if self.forward.startswith("npu_") else self.rows, H)
        routes = [[(e - t) % E < self.topk for e in range(E)] for t in range(T)]
        leaves = {
            "x": torch.zeros(size, dtype=dtype, device=device).requires_grad_(),
            "routing_map": torch.tensor(routes).to(device),
        }
        if self.probs is not None:
            leaves["probs"] = torch.zeros(T, E, dtype=getattr(torch, self.probs), device=device).requires_grad_()
        return leaves

    def _how(self) -> tuple[tuple[bool], dict[str, Any]]:
        return (self.capacity is not None,), {} if self.capacity is not None else {"topk": self.topk}


@dataclass(frozen=True)
class Permute(_Permutation):
    forward = "npu_moe_token_permute_with_routing_map"
    backward = "npu_moe_token_permute_with_routing_map_grad"
    saved = {"sorted_indices": 2}  # noqa: RUF012

    def run(self, leaves: Tensors) -> Any:
        from mindspeed_lite.ops.permute import permute

        drop, topk = self._how()
        return permute(leaves["x"], leaves["routing_map"], leaves.get("probs"), self.rows, *drop, **topk)

    def arguments(self) -> Mapping[str, Any]:
        dtype, probs = self.given
        return {
            "tokens": Tensor(dtype, (T, H), ""),
            "routing_map": Tensor("bool", (T, E), ""),
            "probs": None if probs is None else Tensor(probs, (T, E), ""),
            "num_out_tokens": self.rows,
            "drop_and_pad": self.capacity is not None,
        }

    def result(self) -> Any:
        probs = None if self.probs is None else Tensor(self.probs, (self.rows,), "")
        return Tensor(self.dtype, (self.rows, H), ""), probs, Tensor("int32", (self.rows,), "")

    def effect(self, call: Call) -> list[str]:
        counts = {sum(row) for row in call.arguments["routing_map"].content}
        even = self.capacity is not None or counts == {self.rows // T}
        return [] if even else [f"tokens have {sorted(counts)} experts: want {self.rows // T} for each"]


@dataclass(frozen=True)
class Unpermute(_Permutation):
    forward = "_npu_moe_token_unpermute_with_routing_map"
    backward = "npu_moe_token_unpermute_with_routing_map_grad"
    saved = {"out_index": 1, "permuted_token_id": 2}  # noqa: RUF012

    def leaves(self, device: str) -> Tensors:
        return {**super().leaves(device), "row_ids": torch.zeros(self.rows, dtype=torch.int32).to(device)}

    def run(self, leaves: Tensors) -> Any:
        from mindspeed_lite.ops.permute import unpermute

        x, row_ids, routing_map = (leaves[name] for name in ("x", "row_ids", "routing_map"))
        return unpermute(x, row_ids, torch.Size([T, H]), leaves.get("probs"), routing_map, *self._how()[0])

    def arguments(self) -> Mapping[str, Any]:
        dtype, probs = self.given
        # Tensors in the order in which the kernel takes them.
        return {
            "permuted_tokens": Tensor(dtype, (self.rows, H), ""),
            "sorted_indices": Tensor("int32", (self.rows,), ""),
            "routing_map": None if probs is None else Tensor("bool", (T, E), ""),
            "probs": None if probs is None else Tensor(probs, (T, E), ""),
            "restore_shape": [T, H],
            "drop_and_pad": self.capacity is not None,
        }

    def result(self) -> Tensor:
        return Tensor(self.dtype, (T, H), "")


CASES = tuple(
    case
    for word, make in (("permute", Permute), ("unpermute", Unpermute))
    for case in (
        make(word),
        make(f"{word} without probs", probs=None),
        *(make(f"{word} {dtype}", dtype=dtype, probs=dtype) for dtype in DTYPES),
        make(f"{word} float16 and wider probs", dtype="float16"),
        make(f"{word} float32 and narrower probs", dtype="float32", probs="bfloat16"),
        make(f"{word} one expert for each token", topk=1),
        make(f"{word} capacity", capacity=3),
        make(f"{word} capacity without probs", capacity=2, probs=None),
        make(f"{word} as many rows as tokens", capacity=T),
    )
)


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

MUTATIONS = {
    "rows left out": Mutation("num_out_tokens=count, ", "", "num_out_tokens is None"),
    "rows for the capacity": Mutation(
        "num_out_tokens=count", "num_out_tokens=count if capacity is None else capacity", "num_out_tokens is 3: want 12"
    ),
    "never dropped": Mutation("drop_and_pad=capacity is not None", "drop_and_pad=False", "drop_and_pad is False"),
    "probs left out": Mutation("x, routing_map, probs=weights, num", "x, routing_map, num", "probs is None"),
    "map transposed": Mutation("x, routing_map, probs=weights, num", "x, routing_map.t(), probs=weights, num",
                               "routing_map is bool[4, 6]: want bool[6, 4]"),
    "dtypes as they come": Mutation("return x.float(), probs.float()", "return x, probs", "want one dtype"),
    "probs of the rows' dtype": Mutation("permuted_probs.to(probs.dtype)", "permuted_probs.to(tokens.dtype)",
                                         "want float32[12]"),
    "no gradient of probs": Mutation("x, routing_map, probs=weights, num", "x, routing_map, probs=None if weights is "
                                     "None else weights.detach(), num", "the gradient of probs is None"),
    "shape of the rows": Mutation("[tokens, permuted.shape[1]]", "list(permuted.shape)", "restore_shape is [12, 32]"),
    "map without probs": Mutation("routing_map=None if probs is None else routing_map", "routing_map=routing_map",
                                  "routing_map is bool[6, 4]: want None"),
    "the second result": Mutation("    )[0]\n", "    )[1]\n", "want bfloat16[6, 32]"),
}  # fmt: skip
