"""`mindspeed_lite.ops.grouped_matmul` on npu_grouped_matmul."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.npu_contract.definitions import (
    DTYPES,
    ContractCase,
    Mutation,
    Tensors,
    by_name,
    cumulative_ends,
    is_tensor,
)
from tests.npu_contract.recorder import Call, Tensor

NAMED = ("group_list", "split_item", "group_type", "group_list_type")


@dataclass(frozen=True)
class _Experts(ContractCase):
    """Experts of weights [n, k], with `counts` rows each; counts of the host unless they are `on_device`."""

    name: str
    counts: tuple[int, ...] = (4, 0, 2)
    n: int = 32
    k: int = 48
    dtype: str = "bfloat16"
    on_device: bool = False

    operator = "grouped_matmul"
    forward = "npu_grouped_matmul"

    @property
    def rows(self) -> int:
        return sum(self.counts)

    @property
    def experts(self) -> int:
        return len(self.counts)

    def given(self, device: str) -> Any:
        return torch.tensor(self.counts).to(device) if self.on_device else list(self.counts)

    def made(self, device: str, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, self.dtype), device=device)

    def effect(self, call: Call) -> list[str]:
        found = call.arguments["group_list"].content
        return [] if found == list(self.counts) else [f"the groups are {found}: want {list(self.counts)}"]


@dataclass(frozen=True)
class Product(_Experts):
    """`grouped_matmul`, whose weights are [n, k] if `transposed` and [k, n] if not."""

    transposed: bool = True
    biased: bool = False
    strided: bool = False

    def leaves(self, device: str) -> Tensors:
        leaves = {
            "x": self.made(device, self.k, self.rows).t() if self.strided else self.made(device, self.rows, self.k)
        }
        shape = (self.n, self.k) if self.transposed else (self.k, self.n)
        for expert in range(self.experts):
            leaves[f"weight {expert}"] = self.made(device, *shape)
            if self.biased:
                leaves[f"bias {expert}"] = self.made(device, self.n)
        return {name: leaf.requires_grad_() for name, leaf in leaves.items()}

    def run(self, leaves: Tensors) -> Any:
        from mindspeed_lite.ops.grouped_matmul import grouped_matmul

        x, biases = leaves["x"], _all(leaves, "bias ") if self.biased else None
        counts = self.given(x.device.type)
        return grouped_matmul(x, _all(leaves, "weight "), counts, biases, transposed=self.transposed)

    @property
    def one(self) -> bool:
        """Whether the weights go in one tensor."""
        return self.dtype == "float32" or self.experts > LONGEST_LIST

    def arguments(self) -> Mapping[str, Any]:
        bias = Tensor("float32" if self.dtype == "bfloat16" else self.dtype, (self.n,), "")
        weight = (self.k, self.n)
        weights = [Tensor(self.dtype, (self.experts, *weight), "")] if self.one else [
            Tensor(self.dtype, weight, "")
        ] * self.experts  # fmt: skip
        return {
            "x": [Tensor(self.dtype, (self.rows, self.k), "")],
            "weight": weights,
            "bias": [bias] * self.experts if self.biased else None,
            "split_item": 2,
            "group_type": 0,
            "group_list_type": 1,
        }

    def result(self) -> Any:
        return Tensor(self.dtype, (self.rows, self.n), "")

    def effect(self, call: Call) -> list[str]:
        copied = [each for each in call.arguments["weight"] if each.contiguous == self.transposed]
        return [*super().effect(call), *(["the weights are not handed over as they lie in memory"] if copied else [])]


@dataclass(frozen=True)
class Backward(Product):
    """`grouped_matmul` and one gradient, which is one product more: that of x, or that of the weights."""

    of: str = "x"

    backward = "npu_grouped_matmul"
    # The products differ in everything but the groups.
    renamed = dict.fromkeys(("x", "weight", "split_item", "group_type"), "of the forward")

    def leaves(self, device: str) -> Tensors:
        return {name: leaf for name, leaf in super().leaves(device).items() if name.startswith(self.of)}

    def run(self, leaves: Tensors) -> Any:
        others = super().leaves(next(iter(leaves.values())).device.type)
        return super().run({name: leaves.get(name, leaf.detach()) for name, leaf in others.items()})


@dataclass(frozen=True)
class WeightGradients(_Experts):
    """`weight_gradients`, and `accumulate_weight_gradients` where nothing adds them up: `main_dtype` is given."""

    main_dtype: str = ""

    def leaves(self, device: str) -> Tensors:
        leaves = {"dy": self.made(device, self.rows, self.n), "x": self.made(device, self.rows, self.k)}
        if self.main_dtype:
            dtype = getattr(torch, self.main_dtype)
            for expert in range(self.experts):
                leaves[f"main {expert}"] = torch.zeros(self.n, self.k, dtype=dtype, device=device)
        return leaves

    def run(self, leaves: Tensors) -> Any:
        from mindspeed_lite.ops.grouped_matmul import accumulate_weight_gradients, weight_gradients

        dy, x = leaves["dy"], leaves["x"]
        if not self.main_dtype:
            return weight_gradients(dy, x, self.given(x.device.type))
        main_grads = _all(leaves, "main ")
        accumulate_weight_gradients(main_grads, dy, x, self.given(x.device.type))
        return main_grads

    def arguments(self) -> Mapping[str, Any]:
        return {
            "x": [Tensor(self.dtype, (self.n, self.rows), "")],
            "weight": [Tensor(self.dtype, (self.rows, self.k), "")],
            "bias": None,
            "split_item": 3,
            "group_type": 2,
            "group_list_type": 1,
        }

    def result(self) -> Any:
        return [Tensor(self.main_dtype or self.dtype, (self.n, self.k), "")] * self.experts


def _all(leaves: Tensors, prefix: str) -> list[torch.Tensor]:
    return [leaf for name, leaf in leaves.items() if name.startswith(prefix)]


CASES = (
    Product("separate weights"),
    Product("float16", dtype="float16"),
    Product("float32", dtype="float32"),
    Product("not transposed", transposed=False),
    Product("biases", biased=True),
    Product("float16 biases", biased=True, dtype="float16"),
    Product("129 experts", counts=(1, 0, 2) * 43, n=4, k=6),
    Product("strided x", strided=True),
    Product("counts of the device", on_device=True),
    Backward("gradient of x"),
    Backward("gradient of x, not transposed", transposed=False, on_device=True),
    Backward("gradient of x, float32", dtype="float32"),
    Backward("gradient of the weights", of="weight"),
    Backward("gradient of the weights, not transposed", of="weight", transposed=False, on_device=True),
    Backward("gradient of the weights, float32", of="weight", dtype="float32"),
    WeightGradients("weight gradients"),
    WeightGradients("added one by one", main_dtype="float32"),
    WeightGradients("added in 16 bits", main_dtype="bfloat16"),
    WeightGradients("added in float32", dtype="float32", main_dtype="float32"),
)


# ---- what is documented ----

LONGEST_LIST, MOST_GROUPS, LIMIT = 128, 1024, 65536


def group_list(name: str, values: Sequence[int], kind: int, total: int) -> Iterator[str]:
    """Rows of each group, int64 on the device: ends (kind 0) or counts (kind 1) that make up `total` rows."""
    if kind == 0:
        yield from cumulative_ends(name, list(values), total)
    elif kind == 1:
        if any(value < 0 for value in values) or sum(values) != total:
            yield f"{name} {list(values)} are not counts: they add up to {sum(values)}, not to {total} rows"
    else:
        yield f"group_list_type is {kind}: 0 for cumulative ends, 1 for counts"


def grouped_matmul(call: Call) -> Iterator[str]:
    """npu_grouped_matmul([x], weights, bias=, group_list=, split_item=, group_type=, group_list_type=) -> [out]

    group_type 0, groups of rows: x [M, K], contiguous; weights a list of [K, N] or one [E, K, N]; out [M, N].
    group_type 2, groups of what is summed over: x [M, K], a transposed view; one weight [K, N]; out [E, M, N].
    """
    a = call.arguments
    yield from by_name(call, *NAMED)
    if len(a["x"]) != 1 or a["group_type"] not in (0, 2) or a["x"][0].dim != 2:
        yield "only group_type 0 and 2 with one x [M, K] have a contract yet"
        return
    (x,), weights, groups = a["x"], a["weight"], a["group_list"]
    if x.dtype not in DTYPES or any(each.dtype != x.dtype for each in weights):
        yield f"x {x} and weight {weights[0]}: want one dtype of {', '.join(DTYPES)}"
    if a["split_item"] not in (2, 3):
        yield f"split_item is {a['split_item']}: 2 or 3 for one tensor out"
    if any(
        size >= LIMIT for each in (x, *weights) for size in each.shape[-2:] if each is not x or a["group_type"] == 0
    ):
        yield f"x {x} and weight {weights[0]}: want dimensions below {LIMIT}"
    shapes = _of_rows(x, weights, a["bias"]) if a["group_type"] == 0 else _of_sums(x, weights, a["bias"])
    yield from shapes
    experts = len(weights) if weights[0].dim == 2 and a["group_type"] == 0 else None
    experts = weights[0].shape[0] if weights[0].dim == 3 else experts
    if not isinstance(groups, Tensor) or groups.dtype != "int64" or groups.dim != 1 or (
        experts is not None and groups.shape != (experts,)
    ):  # fmt: skip
        yield f"group_list is {groups}: want int64[{'E' if experts is None else experts}], one entry per group"
        return
    if groups.shape[0] > MOST_GROUPS or (a["group_list_type"] == 1 and groups.shape[0] == 1):
        yield f"{groups.shape[0]} groups: want up to {MOST_GROUPS}, and several where they are counts"
    if groups.content is not None:
        total = x.shape[0] if a["group_type"] == 0 else x.shape[1]
        yield from group_list("group_list", groups.content, a["group_list_type"], total)
    if call.results is not None and a["split_item"] in (2, 3):
        width = weights[0].shape[-1]
        shape = (x.shape[0], width) if a["group_type"] == 0 else (groups.shape[0], x.shape[0], width)
        result = call.results[0] if len(call.results) == 1 else call.results
        yield from is_tensor("result 0", result[0] if isinstance(result, list) else result, x.dtype, shape)


def _of_rows(x: Tensor, weights: Sequence[Tensor], bias: Sequence[Tensor] | None) -> Iterator[str]:
    first = weights[0]
    if not x.contiguous:
        yield "x is not contiguous, and must not be transposed"
    if first.dim not in (2, 3) or first.shape[-2] != x.shape[1] or any(each.shape != first.shape for each in weights):
        yield f"x {x} and weight {first} do not fit: want [M, K] and [K, N] of each expert, or [E, K, N]"
    if len(weights) > (1 if first.dim == 3 or x.dtype == "float32" else LONGEST_LIST):
        yield f"{len(weights)} weights {first}: want up to {LONGEST_LIST} of 16 bits, or one [E, K, N]"
    if any(each.contiguous != first.contiguous for each in weights):
        yield "some weights are transposed and some are not"
    if bias is not None:
        wanted = "float16" if x.dtype == "float16" else "float32"
        if first.dim == 3 or len(bias) != len(weights):
            yield f"{len(bias)} biases for {len(weights)} weights {first}: want one for each of a list"
        for each in bias:
            yield from is_tensor("a bias", each, wanted, (first.shape[-1],))


def _of_sums(x: Tensor, weights: Sequence[Tensor], bias: Sequence[Tensor] | None) -> Iterator[str]:
    (weight,) = weights if len(weights) == 1 else (None,)
    if weight is None or weight.dim != 2 or weight.shape[0] != x.shape[1]:
        yield f"x {x} and {len(weights)} weights {weights[0]} do not fit: want [M, K] and one [K, N]"
    elif x.contiguous or not weight.contiguous:
        yield "want x as a transposed view, and weight not transposed"
    if bias is not None:
        yield "there is no bias for groups of what is summed over"


CONTRACTS = {"npu_grouped_matmul": grouped_matmul}

_FORWARD, _SUMS = "        group_type=0,\n", "        group_type=2,\n        group_list_type=1,\n"
_LISTS = "x.dtype in _HALF and len(weights) <= _LONGEST_LIST"

MUTATIONS = {
    "weights copied": Mutation(
        "each.transpose(-2, -1) if transposed", "each.transpose(-2, -1).contiguous() if transposed", "as they lie in"
    ),
    "a weight left out": Mutation("for each in matrices],", "for each in matrices[1:]],", "want int64[2]"),
    "strides handed on": Mutation(
        "        [x.contiguous()],\n        [each", "        [x],\n        [each", "must not be transposed"
    ),
    "dy not transposed": Mutation("[dy.contiguous().t()]", "[dy.contiguous()]", "do not fit"),
    "counts for ends": Mutation(
        f"{_FORWARD}        group_list_type=1", f"{_FORWARD}        group_list_type=0", "is not cumulative"
    ),
    "kind left to the default": Mutation(_SUMS, "        group_type=2,\n", "group_list_type not passed by name"),
    "a tensor for each weight": Mutation("split_item=2", "split_item=0", "split_item is 0"),
    "bias in 16 bits": Mutation("each.float() if each.dtype == torch.bfloat16 else each", "each", "want float32[32]"),
    "a list of float32": Mutation(_LISTS, "len(weights) <= _LONGEST_LIST", "or one [E, K, N]"),
}
