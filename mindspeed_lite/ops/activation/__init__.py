"""The activation of a transformer's MLP with its bias and, for experts, its per-token weights, as one operator."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mindspeed_lite.ops.activation import recompute, reference
from mindspeed_lite.ops.dispatch import Operator

__all__ = ["KINDS", "OPERATOR", "Case", "activation"]

KINDS = (*reference.GATED, *reference.PLAIN)


class Case(NamedTuple):
    """What decides which backend can serve a call."""

    device: str
    dtype: torch.dtype
    kind: str
    bias_dtype: torch.dtype | None
    weights_dtype: torch.dtype | None
    # Whether the halves are clamped or the linear one is offset.
    has_clamp_or_offset: bool


OPERATOR = Operator(
    "activation",
    # The definition, but keeping only its inputs.
    recompute.activation,
    {
        "cpu": "mindspeed_lite.ops.activation.cpu",
        "cuda": "mindspeed_lite.ops.activation.cuda",
        "npu": "mindspeed_lite.ops.activation.npu",
    },
)


def activation(
    x: torch.Tensor,
    kind: str,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    linear_offset: float = 0.0,
    clamp: float | None = None,
) -> torch.Tensor:
    """y = f(x + bias) * weights.

    Gated kinds, where gate and up are the halves of the last dimension of x + bias:
        swiglu          silu(gate) * (up + linear_offset)
        geglu           gelu(gate) * (up + linear_offset), gelu in its tanh approximation
        quick_geglu     gate * sigmoid(1.702 gate) * (up + linear_offset)
    with gate limited to at most `clamp`, and up to [-clamp, clamp], if it is given. Kinds of one input:
        gelu            its tanh approximation
        squared_relu    max(x, 0)^2

    x: [..., W], any strides; bias: [W]; weights: [..., 1], a number for every row; each in a dtype of its own.
    y: [..., W / 2] of a gated kind, else [..., W], in x's dtype. Everything is computed in fp32 (float64 for a
    float64 x) and rounded once, to x's dtype. For the backward pass x, bias and weights are kept and nothing else.
    Gradients of bias (a sum over rows) and weights (a sum over the last dimension) are summed in fp32 and come in
    their own dtypes. What a backend does differently stands in its file.

    Raises ValueError for an unknown kind and for shapes that do not fit it.
    """
    return OPERATOR.choose(_case(x, kind, bias, weights, linear_offset, clamp))(
        x, kind, bias, weights, linear_offset, clamp
    )


def _case(
    x: torch.Tensor,
    kind: str,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    linear_offset: float,
    clamp: float | None,
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
    return Case(
        x.device.type,
        x.dtype,
        kind,
        None if bias is None else bias.dtype,
        None if weights is None else weights.dtype,
        has_clamp_or_offset,
    )
