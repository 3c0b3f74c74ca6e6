"""`mindspeed_lite.ops.my_op` on npu_fast_gelu and npu_fast_gelu_backward."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_lite.ops.my_op import my_op
from tests.npu_contract.definitions import DTYPES, Call, OperatorCall, Tensor, is_tensor


def _gelu(*shape: int, dtype: str = "bfloat16") -> OperatorCall:
    return lambda make: my_op(make(*shape, dtype=dtype))


CALLS = {
    **{f"{len(shape)} dimensions": _gelu(*shape) for shape in ((), (8,), (5, 64), (1,) * 8 + (64,))},
    "float16": _gelu(6, 2, 64, dtype="float16"),
}


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
