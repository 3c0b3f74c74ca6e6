"""Layer normalisation over the last dimension."""

from __future__ import annotations

from torch import Tensor

from mindspeed_lite.ops import norm

__all__ = ["OPERATOR", "layer_norm"]

OPERATOR = norm.operator("layer_norm")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, zero_centered: bool = False) -> Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * w + `bias`, w = `weight` (+ 1 if `zero_centered`).

    x, y: [..., H] in one dtype; weight, bias: [H] in one dtype, maybe another; biased variance. Computed in fp32
    (float64 for float64) and rounded once. Saves x, weight and two fp32 values per row (mean, 1 / std). Weight and bias
    gradients are summed in fp32. Backend files state deviations.
    """
    if weight.dim() != 1 or bias.shape != weight.shape or x.dim() == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            "layer_norm: want x [..., H], weight [H] and bias [H], not "
            f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(bias.shape)}"
        )
    if bias.dtype != weight.dtype:
        raise ValueError(f"layer_norm: want weight and bias of one dtype, not {weight.dtype} and {bias.dtype}")
    return norm.run(OPERATOR, x, weight, bias, eps, zero_centered)
