"""`mindspeed_lite.ops.my_op` on npu_fast_gelu and npu_fast_gelu_backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.npu_contract.definitions import DTYPES, ContractCase, Mutation, Tensors, is_tensor
from tests.npu_contract.recorder import Call, Tensor


@dataclass(frozen=True)
class MyOp(ContractCase):
    """`mindspeed_lite.ops.my_op.my_op`."""

    name: str
    shape: tuple[int, ...] = (6, 2, 64)
    dtype: str = "bfloat16"

    operator = "my_op"
    forward = "npu_fast_gelu"
    backward = "npu_fast_gelu_backward"

    def leaves(self, device: str) -> Tensors:
        return {"x": torch.zeros(self.shape, dtype=getattr(torch, self.dtype), device=device).requires_grad_()}

    def run(self, leaves: Tensors) -> torch.Tensor:
        from mindspeed_lite.ops.my_op import my_op

        return my_op(leaves["x"])

    def arguments(self) -> Mapping[str, Any]:
        shape = self.shape if 1 <= len(self.shape) <= 8 else (math.prod(self.shape),)
        return {"input": Tensor(self.dtype, shape, "")}

    def result(self) -> Tensor:
        return Tensor(self.dtype, self.shape, "", contiguous=False)


CASES = (
    *(MyOp(f"{len(shape)} dimensions", shape=shape) for shape in ((), (8,), (5, 64), (6, 2, 64), (1,) * 8 + (64,))),
    *(MyOp(dtype, dtype=dtype) for dtype in DTYPES),
)


# ---- what is documented ----


def fast_gelu(call: Call) -> Iterator[str]:
    """npu_fast_gelu(input) -> y"""
    x = call.arguments["input"]
    yield from _input(x)
    if call.results is not None:
        yield from is_tensor("result 0 (y)", call.results[0], x.dtype, x.shape)


def fast_gelu_backward(call: Call) -> Iterator[str]:
    """npu_fast_gelu_backward(grad, input) -> dx"""
    x = call.arguments["input"]
    yield from _input(x)
    yield from is_tensor("grad", call.arguments["grad"], x.dtype, x.shape)
    if call.results is not None:
        yield from is_tensor("result 0 (dx)", call.results[0], x.dtype, x.shape)


def _input(x: Tensor) -> Iterator[str]:
    if x.dtype not in DTYPES:
        yield f"input is {x.dtype}: want one of {', '.join(DTYPES)}"
    if not 1 <= x.dim <= 8:
        yield f"input has {x.dim} dimensions: want 1 to 8"


CONTRACTS = {"npu_fast_gelu": fast_gelu, "npu_fast_gelu_backward": fast_gelu_backward}

MUTATIONS = {
    "any rank": Mutation("x if 1 <= x.dim() <= 8 else x.reshape(-1)", "x", "want 1 to 8"),
    "widened": Mutation("npu_fast_gelu(rows)", "npu_fast_gelu(rows.float())", "float32"),
}
