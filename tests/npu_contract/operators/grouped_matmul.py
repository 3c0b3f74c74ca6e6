"""`mindspeed_lite.ops.grouped_matmul` on npu_grouped_matmul."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mindspeed_lite.ops import grouped_matmul as operators
from tests.npu_contract.definitions import (
    DTYPES,
    Call,
    Make,
    OperatorCall,
    Tensor,
    by_name,
    cumulative_ends,
    is_tensor,
)  # fmt: skip

NAMED = ("group_list", "split_item", "group_type", "group_list_type")
N, K, COUNTS = 32, 48, (4, 0, 2)


def _product(
    counts: Sequence[int] = COUNTS, dtype: str = "bfloat16", biased: bool = False, strided: bool = False,
    on_device: bool = False, transposed: bool = True, n: int = N, k: int = K,
) -> OperatorCall:  # fmt: skip
    """Of experts with these counts, whose weights are [n, k] if `transposed` and [k, n] if not."""

    def call(make: Make) -> Any:
        rows = sum(counts)
        x = make(k, rows, dtype=dtype).t() if strided else make(rows, k, dtype=dtype)
        weights = [make(*((n, k) if transposed else (k, n)), dtype=dtype) for _ in counts]
        biases = [make(n, dtype=dtype) for _ in counts] if biased else None
        given: Any = make.of(torch.tensor(counts)) if on_device else list(counts)
        return operators.grouped_matmul(x, weights, given, biases, transposed=transposed)

    return call


def _weight_gradients(main: str = "", dtype: str = "bfloat16") -> OperatorCall:
    """`weight_gradients`, or what `accumulate_weight_gradients` adds to main gradients of that dtype."""

    def call(make: Make) -> Any:
        dy, x = (make(sum(COUNTS), width, dtype=dtype, grad=False) for width in (N, K))
        if not main:
            return operators.weight_gradients(dy, x, list(COUNTS))
        main_grads = [make(N, K, dtype=main, grad=False) for _ in COUNTS]
        operators.accumulate_weight_gradients(main_grads, dy, x, list(COUNTS))
        return main_grads

    return call


CALLS = {
    "float16": _product(dtype="float16"),
    "float32, not transposed": _product(dtype="float32", transposed=False),
    "not transposed, counts of the device": _product(transposed=False, on_device=True),
    "biases": _product(biased=True),
    "float16 biases": _product(biased=True, dtype="float16"),
    "129 experts": _product((1, 0, 2) * 43, n=4, k=6),
    "strided x": _product(strided=True),
    "weight gradients": _weight_gradients(),
    "added one by one": _weight_gradients("float32"),
    "added in 16 bits": _weight_gradients("bfloat16"),
    "added in float32": _weight_gradients("float32", "float32"),
}


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
