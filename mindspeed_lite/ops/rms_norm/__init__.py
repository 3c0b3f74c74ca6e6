"""Root-mean-square normalisation over the last dimension, for the norm modules of a transformer."""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import torch

from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.rms_norm import reference

__all__ = ["OPERATOR", "Case", "rms_norm", "why_not"]


class Case(NamedTuple):
    """What decides which backend can serve a call."""

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    zero_centered: bool
    residual: bool = False


OPERATOR = Operator(
    "rms_norm",
    reference.rms_norm,
    {
        "cpu": "mindspeed_lite.ops.rms_norm.cpu",
        "cuda": "mindspeed_lite.ops.rms_norm.cuda",
        "npu": "mindspeed_lite.ops.rms_norm.npu",
    },
)


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, zero_centered: bool = False, residual: None = None
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, zero_centered: bool = False, *, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    zero_centered: bool = False,
    residual: torch.Tensor | None = None,
) -> Any:
    """y = x / sqrt(mean(x^2, -1) + eps) * w, where w is `weight`, or 1 + `weight` if `zero_centered`.

    x: [..., H], any strides; weight: [H], in x's dtype or another; y: [..., H] in x's dtype.
    With `residual`, of x's shape and dtype: s = x + residual, rounded to x's dtype, is what is normalised, and
    (y, s) is returned.

    Everything is computed in fp32 (float64 for a float64 x) and rounded once, to x's dtype. For the backward
    pass x (or s), weight and one fp32 number per row (1 / rms) are kept. The gradient of weight is summed over
    rows in fp32 and comes in weight's dtype; the gradients of y and s are joined in the same pass. What a backend
    does differently stands in its file.
    """
    if weight.dim() != 1 or x.dim() == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"rms_norm: want x [..., H] and weight [H], not {tuple(x.shape)} and {tuple(weight.shape)}")
    if residual is None:
        case = Case(x.device.type, x.dtype, weight.dtype, zero_centered)
        return OPERATOR.choose(case)(x, weight, eps, zero_centered)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"rms_norm: want x and residual of one shape and dtype, not {x.dtype} {tuple(x.shape)} and "
            f"{residual.dtype} {tuple(residual.shape)}"
        )
    case = Case(x.device.type, x.dtype, weight.dtype, zero_centered, True)
    return OPERATOR.choose(case)(x, weight, eps, zero_centered, residual)


def why_not(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    zero_centered: bool = False,
    residual: torch.Tensor | None = None,
) -> list[str]:
    """Every reason why this call would run on the reference, not on its device's backend; empty if none."""
    return OPERATOR.why_not(Case(x.device.type, x.dtype, weight.dtype, zero_centered, residual is not None))
