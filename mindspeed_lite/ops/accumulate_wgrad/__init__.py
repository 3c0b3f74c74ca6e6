"""The weight gradient of a linear layer, added to the buffer that gradients are accumulated in."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mindspeed_lite.ops.accumulate_wgrad import reference
from mindspeed_lite.ops.dispatch import Operator

__all__ = ["OPERATOR", "Case", "accumulate_wgrad", "why_not"]


class Case(NamedTuple):
    """What decides which backend can serve a call."""

    device: str
    dtype: torch.dtype
    main_dtype: torch.dtype
    contiguous: bool
    """Whether main_grad is."""


OPERATOR = Operator(
    "accumulate_wgrad",
    reference.accumulate_wgrad,
    {
        "cpu": "mindspeed_lite.ops.accumulate_wgrad.cpu",
        "cuda": "mindspeed_lite.ops.accumulate_wgrad.cuda",
        "npu": "mindspeed_lite.ops.accumulate_wgrad.npu",
    },
)


def accumulate_wgrad(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """main_grad += dy^T x, in place: the weight gradient of y = x w^T for every row of x. Returns main_grad.

    main_grad: [N, K] in the dtype of x, or in fp32; dy: [M, N] and x: [M, K] in one dtype, any strides. The backends
    sum over M in fp32 and add that sum to main_grad as it is; the reference rounds it to the dtype of x first, as
    autograd does, and is bitwise `main_grad.add_(dy.t() @ x)`. The same input gives the same bits at every call. It
    is a step of a backward pass and not differentiable itself.
    """
    if (
        main_grad.dim() != 2
        or dy.dim() != 2
        or x.dim() != 2
        or dy.shape[0] != x.shape[0]
        or main_grad.shape != (dy.shape[1], x.shape[1])
    ):
        raise ValueError(
            f"accumulate_wgrad: want main_grad [N, K], dy [M, N] and x [M, K], not {tuple(main_grad.shape)}, "
            f"{tuple(dy.shape)} and {tuple(x.shape)}"
        )
    if dy.dtype != x.dtype:
        raise ValueError(f"accumulate_wgrad: dy is {dy.dtype} and x {x.dtype}: want one dtype")
    if x.numel() == 0 or dy.numel() == 0:
        return main_grad
    with torch.no_grad():
        return OPERATOR.choose(_case(main_grad, x))(main_grad, dy, x)


def why_not(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> list[str]:
    """Every reason why this call would run on the reference, not on its device's backend; empty if none."""
    return OPERATOR.why_not(_case(main_grad, x))


def _case(main_grad: torch.Tensor, x: torch.Tensor) -> Case:
    return Case(x.device.type, x.dtype, main_grad.dtype, main_grad.is_contiguous())
