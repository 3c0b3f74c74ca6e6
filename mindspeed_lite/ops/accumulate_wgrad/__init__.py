"""Adds the weight gradient of a linear layer to its accumulation buffer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.accumulate_wgrad import reference
from mindspeed_lite.ops.dispatch import Operator

__all__ = ["OPERATOR", "Case", "accumulate_wgrad", "sums_in_main_dtype"]


class Case(NamedTuple):
    device: str
    dtype: torch.dtype
    main_dtype: torch.dtype
    contiguous: bool


OPERATOR = Operator("accumulate_wgrad", reference.accumulate_wgrad, batch_dependence={})


def accumulate_wgrad(main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """main_grad += dy^T x in place: the weight gradient of y = x w^T. Returns main_grad.

    main_grad: [N, K] in x's dtype or fp32; dy: [M, N] and x: [M, K] in one dtype. CUDA and NPU add the fp32 sum; the
    reference (CPU) first rounds it to x's dtype, as autograd does. Deterministic, not differentiable.
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
        return OPERATOR.choose(_case(main_grad, x), main_grad)(main_grad, dy, x)


def sums_in_main_dtype(main_grad: Tensor, x: Tensor) -> bool:
    """True if the sum over M is rounded only to main_grad's dtype."""
    if main_grad.dtype == x.dtype:
        return True
    return OPERATOR.choose(_case(main_grad, x), main_grad) is not reference.accumulate_wgrad


def _case(main_grad: Tensor, x: Tensor) -> Case:
    return Case(x.device.type, x.dtype, main_grad.dtype, main_grad.is_contiguous())
