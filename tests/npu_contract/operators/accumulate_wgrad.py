"""`mindspeed_lite.ops.accumulate_wgrad` on npu_grouped_matmul_add_."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad
from tests.npu_contract.definitions import Call, Make, OperatorCall, Tensor, by_name
from tests.npu_contract.operators.grouped_matmul import group_list

NAMED = ("transpose_x", "transpose_weight", "group_type")


def _sum(rows: int = 6, dtype: str = "bfloat16", transposed: bool = False) -> OperatorCall:
    def call(make: Make) -> Any:
        sizes = [(width, rows) if transposed else (rows, width) for width in (32, 48)]
        dy, x = (make(*size, dtype=dtype, grad=False) for size in sizes)
        main_grad = make(32, 48, dtype="float32", grad=False)
        return accumulate_wgrad(main_grad, *((dy.t(), x.t()) if transposed else (dy, x)))

    return call


CALLS = {"float16": _sum(dtype="float16"), "one row": _sum(rows=1), "transposed": _sum(transposed=True)}


# ---- what is documented ----


def grouped_matmul_add(call: Call) -> Iterator[str]:
    """npu_grouped_matmul_add_(input, x, weight, group_list, transpose_x=, transpose_weight=, group_type=) -> input

    input [E, N, K] in fp32 += x^T weight, with x [M, N] and weight [M, K] in 16 bits, for the rows of each group.
    """
    a = call.arguments
    main, x, weight, groups = a["input"], a["x"], a["weight"], a["group_list"]
    yield from by_name(call, *NAMED)
    if main.dtype != "float32":
        yield f"input is {main.dtype}: it accumulates in float32"
    if x.dtype not in ("float16", "bfloat16") or weight.dtype != x.dtype:
        yield f"x is {x.dtype} and weight {weight.dtype}: want one of float16, bfloat16"
    if (a["transpose_x"], a["transpose_weight"], a["group_type"]) != (True, False, 2):
        yield "want x transposed, weight as it is, and groups of the summed dimension (group_type 2)"
    if main.dim != 3 or x.dim != 2 or weight.dim != 2:
        yield f"input {main}, x {x} and weight {weight}: want three, two and two dimensions"
        return
    if x.shape[0] != weight.shape[0] or main.shape[1:] != (x.shape[1], weight.shape[1]):
        yield f"input {main}, x {x} and weight {weight} do not fit: want [E, N, K], [M, N] and [M, K]"
    if not (main.contiguous and x.contiguous and weight.contiguous):
        yield "a tensor is not contiguous"
    if not isinstance(groups, Tensor) or groups.dtype != "int64" or groups.shape != main.shape[:1]:
        yield f"group_list is {groups}: want int64{list(main.shape[:1])}, one entry per group"
    elif groups.content is not None:
        yield from group_list("group_list", groups.content, a["group_list_type"], x.shape[0])


CONTRACTS = {"npu_grouped_matmul_add_": grouped_matmul_add}
