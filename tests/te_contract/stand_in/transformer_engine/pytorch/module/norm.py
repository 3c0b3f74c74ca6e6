"""LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import Any

import torch

from .base import ExtraState


class _Normalize(torch.autograd.Function):
    """Saves the input and statistics of its rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, bias: Any, eps: float, centers: bool) -> torch.Tensor:
        values = x.float()
        mean = values.mean(-1, keepdim=True) if centers else None
        if mean is not None:
            values = values - mean
        factor = (values.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, mean, factor)
        ctx.scale, ctx.has_bias = scale, bias is not None
        out = values * factor * scale.float()
        return (out if bias is None else out + bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x, mean, factor), grad = ctx.saved_tensors, grads[0].float()
        unit = (x.float() if mean is None else x.float() - mean) * factor
        of_unit = grad * ctx.scale.float()
        grad_x = of_unit - unit * (of_unit * unit).mean(-1, keepdim=True)
        if mean is not None:
            grad_x = grad_x - of_unit.mean(-1, keepdim=True)
        kind, grad_bias = ctx.scale.dtype, grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        grad_scale = (grad * unit).flatten(0, -2).sum(0).to(kind)
        return (factor * grad_x).to(x.dtype), grad_scale, None if grad_bias is None else grad_bias.to(kind), None, None


def normalize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, zero_centered: bool, kind: str
) -> torch.Tensor:
    """LayerNorm or RMSNorm over the last dimension; a zero-centered weight is stored less one."""
    if kind not in ("LayerNorm", "RMSNorm"):
        raise AssertionError("Unsupported normalization type!")
    scale = weight + 1 if zero_centered else weight
    found: torch.Tensor = _Normalize.apply(x, scale, bias, eps, kind == "LayerNorm")
    return found


class _Norm(ExtraState):
    kind: str

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        size = normalized_shape if normalized_shape is not None else hidden_size
        shape = (size,) if isinstance(size, int) else tuple(size)
        options = {"dtype": params_dtype or kwargs.get("dtype"), "device": kwargs.get("device")}
        self.eps, self.zero_centered_gamma, self.sequence_parallel = eps, zero_centered_gamma, sequence_parallel
        self.weight = torch.nn.Parameter(torch.full(shape, 0.0 if zero_centered_gamma else 1.0, **options))
        bias = torch.nn.Parameter(torch.zeros(shape, **options)) if self.kind == "LayerNorm" else None
        self.register_parameter("bias", bias)
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
