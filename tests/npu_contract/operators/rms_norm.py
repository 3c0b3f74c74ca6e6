"""`mindspeed_lite.ops.rms_norm` on npu_rms_norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_lite.ops.rms_norm import rms_norm as operator
from tests.npu_contract.definitions import DTYPES, Call, Make, OperatorCall, Tensor, by_name, is_tensor

UNFUSED = ("aten::_fused_rms_norm", "aten::rsqrt")


def _norm(*shape: int, dtype: str = "bfloat16", transposed: bool = False, **options: Any) -> OperatorCall:
    def call(make: Make) -> Any:
        x = make(*shape, dtype=dtype)
        return operator(x.transpose(0, 1) if transposed else x, make(shape[-1], dtype=dtype), **options)

    return call


# eps is never torch_npu's own default.
CALLS = {
    **{f"{len(shape) + 1} dimensions": _norm(*shape, 64) for shape in ((), (5,), (6, 2), (1, 2) * 3, (1, 2) * 4)},
    "float16": _norm(6, 2, 64, dtype="float16", eps=0.5),
    "zero-centered": _norm(64, zero_centered=True),
    "transposed": _norm(6, 2, 64, transposed=True),
}


# ---- what is documented ----


def rms_norm(call: Call) -> Iterator[str]:
    """npu_rms_norm(input, gamma, epsilon=) -> y, rstd"""
    x, gamma, epsilon = (call.arguments[name] for name in ("input", "gamma", "epsilon"))
    yield from by_name(call, "epsilon")
    if not isinstance(gamma, Tensor):
        yield f"gamma is {gamma}"
        return
    yield from _inputs(x, gamma)
    if not 0.0 < epsilon < 1.0:
        yield f"epsilon is {epsilon}"
    if call.results is not None:
        yield from is_tensor("result 0 (y)", call.results[0], x.dtype, x.shape)
        yield from is_tensor("result 1 (rstd)", call.results[1], "float32", _rstd(x, gamma))


def rms_norm_backward(call: Call) -> Iterator[str]:
    """npu_rms_norm_backward(dy, input, gamma, rstd) -> dx, dgamma; dgamma is fp32 and autograd casts it"""
    a = call.arguments
    x, gamma = a["input"], a["gamma"]
    yield from _inputs(x, gamma)
    yield from is_tensor("dy", a["dy"], x.dtype, x.shape)
    yield from is_tensor("rstd", a["rstd"], "float32", _rstd(x, gamma))
    if call.results is not None:
        yield from is_tensor("result 0 (dx)", call.results[0], x.dtype, x.shape)
        yield from is_tensor("result 1 (dgamma)", call.results[1], "float32", gamma.shape)


def _inputs(x: Tensor, gamma: Tensor) -> Iterator[str]:
    if x.dtype not in DTYPES:
        yield f"input is {x.dtype}: want one of {', '.join(DTYPES)}"
    if gamma.dtype != x.dtype:
        yield f"gamma is {gamma.dtype} and input {x.dtype}: want one dtype"
    if not 2 <= x.dim <= 8:
        yield f"input has {x.dim} dimensions: want 2 to 8"
    if gamma.dim == 0 or gamma.shape != x.shape[-gamma.dim :]:
        yield f"gamma is {gamma}: want the last dimensions of input {x}"


def _rstd(x: Tensor, gamma: Tensor) -> tuple[int, ...]:
    return (*x.shape[: -gamma.dim or None], *(1 for _ in gamma.shape))


CONTRACTS = {
    "npu_rms_norm": rms_norm,
    "npu_rms_norm_backward": rms_norm_backward,
}
