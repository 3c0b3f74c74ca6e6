"""LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from .base import ExtraState


def normalize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, zero_centered: bool, kind: str
) -> torch.Tensor:
    """LayerNorm or RMSNorm over the last dimension; a zero-centered weight is stored less one."""
    scale = weight + 1 if zero_centered else weight
    if kind == "LayerNorm":
        return F.layer_norm(x, scale.shape, scale, bias, eps)
    if kind == "RMSNorm":
        return F.rms_norm(x, scale.shape, scale, eps)
    raise AssertionError("Unsupported normalization type!")


class _Norm(ExtraState):
    kind: str

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        size: Any = normalized_shape if normalized_shape is not None else hidden_size
        shape = (size,) if isinstance(size, int) else tuple(size)
        options = {"dtype": params_dtype or kwargs.get("dtype"), "device": kwargs.get("device")}
        self.eps, self.zero_centered_gamma, self.sequence_parallel = eps, zero_centered_gamma, sequence_parallel
        self.weight = torch.nn.Parameter(torch.full(shape, 0.0 if zero_centered_gamma else 1.0, **options))
        self.register_parameter(
            "bias", torch.nn.Parameter(torch.zeros(shape, **options)) if self.kind == "LayerNorm" else None
        )
        for param in self.parameters():
            if sequence_parallel is not None:
                param.sequence_parallel = sequence_parallel

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """The normalized input."""
        return normalize(inp, self.weight, self.bias, self.eps, self.zero_centered_gamma, self.kind)


class LayerNorm(_Norm):
    """Normalized to mean zero and variance one."""

    kind = "LayerNorm"


class RMSNorm(_Norm):
    """Normalized to mean square one."""

    kind = "RMSNorm"
