"""`mindspeed_lite.ops.accumulate_wgrad` on npu_grouped_matmul_add_."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.npu_contract.definitions import ContractCase, Mutation, Tensors, by_name
from tests.npu_contract.operators.grouped_matmul import group_list
from tests.npu_contract.recorder import Call, Tensor

NAMED = ("transpose_x", "transpose_weight", "group_type")


@dataclass(frozen=True)
class AccumulateWgrad(ContractCase):
    """`mindspeed_lite.ops.accumulate_wgrad.accumulate_wgrad` for dy [M, N] and x [M, K]."""

    name: str
    rows: int = 6
    n: int = 32
    k: int = 48
    dtype: str = "bfloat16"
    transposed: bool = False

    operator = "accumulate_wgrad"
    forward = "npu_grouped_matmul_add_"

    def leaves(self, device: str) -> Tensors:
        dtype = getattr(torch, self.dtype)
        return {
            "main_grad": torch.zeros(self.n, self.k, device=device),
            "dy": self._made(self.n, dtype, device),
            "x": self._made(self.k, dtype, device),
        }

    def _made(self, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        if self.transposed:
            return torch.zeros(width, self.rows, dtype=dtype, device=device).t()
        return torch.zeros(self.rows, width, dtype=dtype, device=device)

    def run(self, leaves: Tensors) -> torch.Tensor:
        from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad

        return accumulate_wgrad(leaves["main_grad"], leaves["dy"], leaves["x"])

    def arguments(self) -> Mapping[str, Any]:
        # Tensors in the order in which the kernel takes them.
        return {
            "x": Tensor(self.dtype, (self.rows, self.n), ""),
            "weight": Tensor(self.dtype, (self.rows, self.k), ""),
            "group_list": Tensor("int64", (1,), ""),
            "input": Tensor("float32", (1, self.n, self.k), ""),
            "transpose_x": True,
            "transpose_weight": False,
            "group_type": 2,
            "group_list_type": 0,
        }

    def result(self) -> Tensor:
        return Tensor("float32", (self.n, self.k), "")

    def effect(self, call: Call) -> list[str]:
        groups = call.arguments["group_list"].content
        return [] if groups == [self.rows] else [f"the groups end at {groups}: want [{self.rows}]"]


CASES = (
    AccumulateWgrad("bfloat16"),
    AccumulateWgrad("float16", dtype="float16"),
    AccumulateWgrad("one row", rows=1),
    AccumulateWgrad("transposed", transposed=True),
)


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

MUTATIONS = {
    "no group dimension": Mutation("main_grad.view(1, *main_grad.shape)", "main_grad", "three, two and two"),
    "operands swapped": Mutation(
        "dy.contiguous(),  # [M, N], transposed by the operator\n        x.contiguous(),",
        "x.contiguous(),\n        dy.contiguous(),",
        "x is bfloat16[6, 48]: want bfloat16[6, 32]",
    ),
    "strides handed on": Mutation("x.contiguous()", "x", "is not contiguous"),
    "a count too many": Mutation("(1,), dy.shape[0]", "(1,), dy.shape[0] + 1", "not cumulative to 6"),
    "32-bit group list": Mutation("dtype=torch.int64", "dtype=torch.int32", "want int64[1]"),
    "groups of rows": Mutation("group_type=2", "group_type=0", "group_type is 0: want 2"),
    "rounded sum": Mutation(
        "return main_grad\n", "return main_grad.to(x.dtype)\n", "the output is bfloat16[32, 48]: want float32[32, 48]"
    ),
}  # fmt: skip
