"""The activation of a transformer's MLP with its bias and, for experts, per-token weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.activation import reference
from mindspeed_lite.ops.activation.reference import ActivationSpec
from mindspeed_lite.ops.batch_invariant import CANN
from mindspeed_lite.ops.dispatch import Operator

__all__ = ["KINDS", "OPERATOR", "ActivationSpec", "Case", "activation"]

KINDS = (*reference.GATED, *reference.PLAIN)


class Case(NamedTuple):
    """Call properties that select a backend."""

    device: str
    dtype: torch.dtype
    kind: str
    bias_dtype: torch.dtype | None
    weights_dtype: torch.dtype | None
    has_clamp_or_offset: bool


OPERATOR = Operator(
    "activation", reference.activation, batch_dependence={"reference": "", "cpu": "", "cuda": "", "npu": CANN}
)


def activation(
    x: Tensor,
    kind: str,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    linear_offset: float = 0.0,
    clamp: float | None = None,
) -> Tensor:
    """y = f(x + bias) * weights.

    Gated kinds, with gate and up the halves of the last dimension of x + bias:
        swiglu          silu(gate) * (up + linear_offset)
        geglu           gelu(gate) * (up + linear_offset), tanh approximation
        quick_geglu     gate * sigmoid(1.702 gate) * (up + linear_offset)
    where `clamp` limits gate to at most clamp and up to [-clamp, clamp]. Others:
        gelu            tanh approximation
        squared_relu    max(x, 0)^2

    x: [..., W], any strides; bias: [W]; weights: [..., 1]; any dtypes. y: [..., W / 2] if gated, else [..., W], in x's
    dtype. Computed in fp32 (float64 for float64), rounded once. Saves x, bias and weights. Gradients of bias and
    weights are summed in fp32.

    Raises ValueError for an unknown kind or unfit shapes.
    """
    case = _case(x, kind, bias, weights, linear_offset, clamp)
    y: Tensor = OPERATOR.choose(case, x)(x, bias, weights, ActivationSpec(kind, linear_offset, clamp))
    return y


def _case(
    x: Tensor, kind: str, bias: Tensor | None, weights: Tensor | None, linear_offset: float, clamp: float | None
) -> Case:
    shape = x.shape
    has_clamp_or_offset = clamp is not None or linear_offset != 0.0
    if kind in reference.GATED:
        if not shape or shape[-1] % 2:
            raise ValueError(f"activation: {kind} wants x [..., 2H], not {tuple(shape)}")
    elif kind not in reference.PLAIN:
        raise ValueError(f"activation: kind is one of {', '.join(KINDS)}, not {kind!r}")
    elif has_clamp_or_offset or not shape:
        raise ValueError(f"activation: {kind} takes x [..., H] and neither linear_offset nor clamp")
    if bias is not None and bias.shape != shape[-1:]:
        raise ValueError(f"activation: want bias {list(shape[-1:])} for x {list(shape)}, not {list(bias.shape)}")
    if weights is not None and weights.shape != (*shape[:-1], 1):
        raise ValueError(f"activation: want weights {[*shape[:-1], 1]} for x {list(shape)}, not {list(weights.shape)}")
    bias_dtype, weights_dtype = (None if each is None else each.dtype for each in (bias, weights))
    return Case(x.device.type, x.dtype, kind, bias_dtype, weights_dtype, has_clamp_or_offset)
