"""`mindspeed_lite.ops.activation` on npu_swiglu and npu_gelu and their backward operators."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.npu_contract.definitions import (
    DTYPES,
    ContractCase,
    Mutation,
    Tensors,
    by_name,
    is_tensor,
)
from tests.npu_contract.recorder import Call, Tensor

UNFUSED = ("aten::silu",)


@dataclass(frozen=True)
class _Activation(ContractCase):
    """`mindspeed_lite.ops.activation.activation`."""

    name: str
    shape: tuple[int, ...] = (6, 2, 128)
    dtype: str = "bfloat16"
    bias: bool = False
    weights: bool = False
    transposed: bool = False

    operator = "activation"
    kind = ""
    gated = True

    def leaves(self, device: str) -> Tensors:
        dtype = getattr(torch, self.dtype)
        leaves = {"x": torch.zeros(self.shape, dtype=dtype, device=device)}
        if self.bias:
            leaves["bias"] = torch.zeros(self.shape[-1:], dtype=dtype, device=device)
        if self.weights:
            leaves["weights"] = torch.zeros(*self._shape()[:-1], 1, device=device)
        return {name: leaf.requires_grad_() for name, leaf in leaves.items()}

    def run(self, leaves: Tensors) -> torch.Tensor:
        from mindspeed_lite.ops.activation import activation

        return activation(self._x(leaves), self.kind, leaves.get("bias"), leaves.get("weights"))

    def arguments(self) -> Mapping[str, Any]:
        shape = self._shape()
        if len(shape) > 8:
            shape = (math.prod(shape[:-1]), shape[-1])
        return {"input": Tensor(self.dtype, shape, ""), **self.options()}

    def options(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def result(self) -> Tensor:
        shape = self._shape()
        half = shape[-1] // 2 if self.gated else shape[-1]
        return Tensor(self.dtype, (*shape[:-1], half), "", contiguous=False)

    def _shape(self) -> tuple[int, ...]:
        return (self.shape[1], self.shape[0], *self.shape[2:]) if self.transposed else self.shape

    def _x(self, leaves: Tensors) -> torch.Tensor:
        return leaves["x"].transpose(0, 1) if self.transposed else leaves["x"]


@dataclass(frozen=True)
class SwiGLU(_Activation):
    forward = "npu_swiglu"
    backward = "npu_swiglu_backward"
    kind = "swiglu"

    def options(self) -> Mapping[str, Any]:
        return {"dim": -1}


@dataclass(frozen=True)
class GELU(_Activation):
    forward = "npu_gelu"
    backward = "npu_gelu_backward"
    kind = "gelu"
    gated = False

    def options(self) -> Mapping[str, Any]:
        return {"approximate": "tanh"}


@dataclass(frozen=True)
class GeGLU(GELU):
    """gelu of the first half."""

    kind = "geglu"
    gated = True

    def arguments(self) -> Mapping[str, Any]:
        given = super().arguments()
        x = given["input"]
        return {**given, "input": Tensor(x.dtype, (*x.shape[:-1], x.shape[-1] // 2), "")}


CASES = tuple(
    case
    for kind, make in (("swiglu", SwiGLU), ("geglu", GeGLU), ("gelu", GELU))
    for case in (
        make(kind),
        *(make(f"{kind} {dtype}", dtype=dtype) for dtype in ("float16", "float32")),
        *(make(f"{kind} {len(shape)} dimensions", shape=shape) for shape in ((128,), (5, 128), (*(1, 2) * 4, 128))),
        make(f"{kind} transposed", transposed=True),
        make(f"{kind} with bias", bias=True),
        make(f"{kind} with weights", weights=True),
        make(f"{kind} with bias and weights", bias=True, weights=True),
    )
)


# ---- what is documented ----


def swiglu(call: Call) -> Iterator[str]:
    """npu_swiglu(input, dim=) -> y"""
    x = call.arguments["input"]
    yield from by_name(call, "dim")
    yield from _halves(x, call.arguments["dim"])
    if call.results is not None:
        yield from is_tensor("result 0 (y)", call.results[0], x.dtype, _half(x))


def swiglu_backward(call: Call) -> Iterator[str]:
    """npu_swiglu_backward(grad_output, input, dim) -> dx"""
    x = call.arguments["input"]
    yield from is_tensor("grad_output", call.arguments["grad_output"], x.dtype, _half(x))
    if call.results is not None:
        yield from is_tensor("result 0 (dx)", call.results[0], x.dtype, x.shape)


def gelu(call: Call) -> Iterator[str]:
    """npu_gelu(input, approximate=) -> y"""
    x = call.arguments["input"]
    yield from by_name(call, "approximate")
    yield from _tensor(x)
    if call.arguments["approximate"] not in ("none", "tanh"):
        yield f"approximate is {call.arguments['approximate']!r}: want 'none' or 'tanh'"
    if call.results is not None:
        yield from is_tensor("result 0 (y)", call.results[0], x.dtype, x.shape)


def gelu_backward(call: Call) -> Iterator[str]:
    """npu_gelu_backward(grad_output, input, approximate=) -> dx"""
    x = call.arguments["input"]
    yield from is_tensor("grad_output", call.arguments["grad_output"], x.dtype, x.shape)
    if call.results is not None:
        yield from is_tensor("result 0 (dx)", call.results[0], x.dtype, x.shape)


def _tensor(x: Tensor) -> Iterator[str]:
    if x.dtype not in DTYPES:
        yield f"input is {x.dtype}: want one of {', '.join(DTYPES)}"
    if not 1 <= x.dim <= 8:
        yield f"input has {x.dim} dimensions: want 1 to 8"


def _halves(x: Tensor, dim: int) -> Iterator[str]:
    yield from _tensor(x)
    if dim != -1 or x.shape[-1] % 2:
        yield f"input is {x} and dim {dim}: want an even last dimension"


def _half(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:-1], x.shape[-1] // 2)


CONTRACTS = {
    "npu_swiglu": swiglu,
    "npu_swiglu_backward": swiglu_backward,
    "npu_gelu": gelu,
    "npu_gelu_backward": gelu_backward,
}

MUTATIONS = {
    "another dimension": Mutation("npu_swiglu(rows, dim=-1)", "npu_swiglu(rows, dim=0)", "dim is 0: want -1"),
    "dim by position": Mutation("npu_swiglu(rows, dim=-1)", "npu_swiglu(rows, -1)", "dim not passed by name"),
    "the other half activated": Mutation("_gelu(gate) * up", "_gelu(rows) * up", "input is bfloat16[6, 2, 128]: want"),
    "gelu's own default": Mutation(', approximate="tanh"', "", "approximate is none: want tanh"),
    "any rank": Mutation("x if x.dim() <= 8 else x.reshape(-1, x.shape[-1])", "x", "want 1 to 8"),
    "bias without gradient": Mutation("bias.to(x.dtype)", "bias.detach().to(x.dtype)", "the gradient of bias is None"),
    "result in the weights' dtype": Mutation("(y * weights.float()).to(x.dtype)", "y * weights", "the output is"),
}  # fmt: skip
