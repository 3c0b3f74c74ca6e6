"""The definition of activation in plain PyTorch: what every backend is tested against."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


# y = f(gate) * up, where gate and up are the halves of the last dimension.
GATED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": _gelu,
    "quick_geglu": _quick_gelu,
}
# y = f(x).
PLAIN: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": _gelu,
    "squared_relu": lambda x: F.relu(x).square(),
}


def activation(
    x: torch.Tensor,
    kind: str,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    linear_offset: float = 0.0,
    clamp: float | None = None,
) -> torch.Tensor:
    """f(x + bias) * weights in x's dtype, where f is of `kind`."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = x.to(dtype)  # [..., W]
    if bias is not None:
        wide = wide + bias.to(dtype)  # [W]
    if kind in GATED:
        gate, up = wide.chunk(2, dim=-1)  # [..., W / 2] each
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        y = GATED[kind](gate) * (up + linear_offset)
    else:
        y = PLAIN[kind](wide)
    if weights is not None:
        y = y * weights.to(dtype)  # [..., 1]
    return y.to(x.dtype)
