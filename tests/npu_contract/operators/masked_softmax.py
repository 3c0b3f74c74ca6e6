"""`mindspeed_lite.ops.masked_softmax` on npu_scaled_masked_softmax and its backward operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_lite.ops.masked_softmax import masked_softmax as operator
from tests.npu_contract.definitions import DTYPES, Call, Make, OperatorCall, Tensor, by_name, is_tensor

UNFUSED = ("aten::_softmax",)


def _softmax(
    mask: tuple[int, ...] | None = None, causal: bool = False, dtype: str = "bfloat16", scale: float = 0.5
) -> OperatorCall:
    """With a mask of that shape, which hides every third key, and one row whole."""

    def call(make: Make) -> Any:
        hidden = None if mask is None else torch.arange(torch.Size(mask).numel()).reshape(mask) % 3 == 0
        if hidden is not None and hidden.dim() > 1:
            hidden[..., 5:6, :] |= hidden.shape[-2] > 1
        given = None if hidden is None else make.of(hidden)
        # Of a row without keys each backend makes what it likes, unless its scores are equal.
        scores = make(2, 3, 32, 32, dtype=dtype) * make.of(torch.arange(32) != 5)[:, None]
        return operator(scores, given, causal=causal, scale=scale)

    return call


CALLS = {
    "causal": _softmax(causal=True),
    "float16": _softmax(causal=True, dtype="float16", scale=1.0),
    "nothing hidden": _softmax(),
    **{
        f"mask {'x'.join(map(str, mask))}": _softmax(mask)
        for mask in ((2, 1, 32, 32), (1, 3, 32, 32), (2, 3, 32, 32), (2, 1, 1, 32), (32, 32), (32,))
    },
    "mask and causal": _softmax((2, 1, 32, 32), causal=True),
}


# ---- what is documented ----


def softmax(call: Call) -> Iterator[str]:
    """npu_scaled_masked_softmax(x, mask, scale=, fixed_triu_mask=) -> y"""
    x, mask = call.arguments["x"], call.arguments["mask"]
    yield from by_name(call, "scale", "fixed_triu_mask")
    yield from _inputs(x, mask, call)
    if call.results is not None:
        yield from is_tensor("result 0 (y)", call.results[0], x.dtype, x.shape)


def softmax_backward(call: Call) -> Iterator[str]:
    """npu_scaled_masked_softmax_backward(y_grad, y, mask, scale, fixed_triu_mask) -> dx"""
    y = call.arguments["y"]
    yield from _inputs(y, call.arguments["mask"], call)
    yield from is_tensor("y_grad", call.arguments["y_grad"], y.dtype, y.shape)
    if call.results is not None:
        yield from is_tensor("result 0 (dx)", call.results[0], y.dtype, y.shape)


def _inputs(x: Tensor, mask: object, call: Call) -> Iterator[str]:
    if x.dtype not in DTYPES:
        yield f"x is {x.dtype}: want one of {', '.join(DTYPES)}"
    if x.dim != 4 or any(size % 32 or not 32 <= size <= 4096 for size in x.shape[2:]):
        yield f"x is {x}: want four dimensions, the last two multiples of 32 from 32 to 4096"
        return
    if not isinstance(mask, Tensor) or mask.dtype != "bool":
        yield f"mask is {mask}: want bool"
    elif (
        mask.dim != 4
        or mask.shape[2:] != x.shape[2:]
        or any(size not in (1, wanted) for size, wanted in zip(mask.shape[:2], x.shape[:2], strict=True))
    ):
        yield f"mask is {mask}: want [{x.shape[0]} or 1, {x.shape[1]} or 1, {x.shape[2]}, {x.shape[3]}]"
    if call.arguments["fixed_triu_mask"] is not False:
        yield "fixed_triu_mask is documented as not implemented: want False"


CONTRACTS = {"npu_scaled_masked_softmax": softmax, "npu_scaled_masked_softmax_backward": softmax_backward}
