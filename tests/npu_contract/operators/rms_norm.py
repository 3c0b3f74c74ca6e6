"""`mindspeed_lite.ops.rms_norm` on npu_rms_norm."""

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

UNFUSED = ("aten::_fused_rms_norm", "aten::rsqrt")


@dataclass(frozen=True)
class RmsNorm(ContractCase):
    """`mindspeed_lite.ops.rms_norm.rms_norm`; eps is never torch_npu's own default."""

    name: str
    shape: tuple[int, ...] = (6, 2, 64)
    dtype: str = "bfloat16"
    eps: float = 1e-5
    zero_centered: bool = False
    transposed: bool = False

    operator = "rms_norm"
    forward = "npu_rms_norm"
    backward = "npu_rms_norm_backward"
    saved = {"rstd": 1}  # noqa: RUF012

    def leaves(self, device: str) -> Tensors:
        dtype = getattr(torch, self.dtype)
        return {
            "x": torch.zeros(self.shape, dtype=dtype, device=device).requires_grad_(),
            "weight": torch.zeros(self.shape[-1], dtype=dtype, device=device).requires_grad_(),
        }

    def run(self, leaves: Tensors) -> torch.Tensor:
        from mindspeed_lite.ops.rms_norm import rms_norm

        return rms_norm(self._x(leaves), leaves["weight"], self.eps, self.zero_centered)

    def arguments(self) -> Mapping[str, Any]:
        shape = self.result().shape
        if not 2 <= len(shape) <= 8:
            shape = (math.prod(shape[:-1]), shape[-1])
        return {
            "input": Tensor(self.dtype, shape, ""),
            "gamma": Tensor(self.dtype, self.shape[-1:], ""),
            "epsilon": self.eps,
        }

    def result(self) -> Tensor:
        shape = self.shape
        if self.transposed:
            shape = (shape[1], shape[0], *shape[2:])
        return Tensor(self.dtype, shape, "", contiguous=False)

    def _x(self, leaves: Tensors) -> torch.Tensor:
        return leaves["x"].transpose(0, 1) if self.transposed else leaves["x"]


CASES = (
    *(RmsNorm(f"{len(shape)} dimensions", shape=shape) for shape in (
        (64,), (5, 64), (6, 2, 64), (3, 2, 2, 64), (2, 2, 2, 2, 64), (1, 2, 1, 2, 1, 64), (1, 2, 1, 2, 1, 2, 64),
        (1, 2, 1, 2, 1, 2, 1, 64), (1, 2, 1, 2, 1, 2, 1, 2, 64),
    )),
    *(RmsNorm(dtype, dtype=dtype) for dtype in ("float16", "float32")),
    *(RmsNorm(f"zero-centered {dtype}", dtype=dtype, zero_centered=True) for dtype in ("bfloat16", "float32")),
    RmsNorm("epsilon", eps=1e-3),
    RmsNorm("transposed", transposed=True),
    RmsNorm("zero-centered, one dimension", shape=(64,), zero_centered=True),
)  # fmt: skip


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

MUTATIONS = {
    "epsilon left out": Mutation("scale, epsilon=eps", "scale", "epsilon is 1e-06: want 1e-05"),
    "epsilon by position": Mutation("scale, epsilon=eps", "scale, eps", "epsilon not passed by name"),
    "weight widened": Mutation(
        "scale, epsilon", "scale.float(), epsilon",
        "gamma is float32 and input bfloat16",
    ),
    "any rank": Mutation("x if 2 <= x.dim() <= 8 else x.reshape(-1, x.shape[-1])", "x", "want 2 to 8"),
    "rstd for the output": Mutation("epsilon=eps)[0]", "epsilon=eps)[1]", "is invalid for input of size"),
    "weight without gradient": Mutation(
        "scale, epsilon", "scale.detach(), epsilon",
        "the gradient of weight is None",
    ),
}  # fmt: skip
