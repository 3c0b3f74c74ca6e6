"""Root-mean-square normalisation over the last dimension."""

from __future__ import annotations

from torch import Tensor

from mindspeed_lite.ops import norm

__all__ = ["OPERATOR", "rms_norm"]

OPERATOR = norm.operator("rms_norm")


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, zero_centered: bool = False) -> Tensor:
    """y = x / sqrt(mean(x^2, -1) + eps) * w, where w is `weight`, or 1 + `weight` if `zero_centered`.

    x, y: [..., H] in one dtype; weight: [H], any dtype. Computed in fp32 (float64 for float64) and rounded once. Saves
    x, weight and one fp32 value per row (1 / rms). The weight gradient is summed in fp32. Backend files state
    deviations.
    """
    if weight.dim() != 1 or x.dim() == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"rms_norm: want x [..., H] and weight [H], not {tuple(x.shape)} and {tuple(weight.shape)}")
    return norm.run(OPERATOR, x, weight, None, eps, zero_centered)
