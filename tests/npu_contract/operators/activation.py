"""`mindspeed_lite.ops.activation` on npu_swiglu and npu_gelu and their backward operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_lite.ops.activation import activation as operator
from tests.npu_contract.definitions import DTYPES, Call, Make, OperatorCall, Tensor, by_name, is_tensor

UNFUSED = ("aten::silu",)


def _activation(
    kind: str, *shape: int, dtype: str = "bfloat16", with_all: bool = False, transposed: bool = False
) -> OperatorCall:
    """With bias and weights, or without."""

    def call(make: Make) -> Any:
        x = make(*shape, dtype=dtype)
        rest = (make(shape[-1], dtype=dtype), make(*shape[:-1], 1, dtype="float32")) if with_all else ()
        return operator(x.transpose(0, 1) if transposed else x, kind, *rest)

    return call


CALLS = {
    f"{kind} {name}".strip(): call
    for kind in ("swiglu", "geglu", "gelu")
    for name, call in {
        "float16": _activation(kind, 6, 2, 128, dtype="float16"),
        "1 dimension": _activation(kind, 128),
        "9 dimensions": _activation(kind, *(1, 2) * 4, 128),
        "transposed": _activation(kind, 6, 2, 128, transposed=True),
        "with bias and weights": _activation(kind, 6, 2, 128, with_all=True),
    }.items()
}


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
