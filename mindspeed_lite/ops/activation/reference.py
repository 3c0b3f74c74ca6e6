"""Reference activation in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_lite.ops import autograd, traced
from mindspeed_lite.ops.rows import precision

aten: Any = torch.ops.aten
# Elements whose intermediates fit a CPU cache.
_BLOCK = 1 << 17


class ActivationSpec(NamedTuple):
    """The options of `activation`."""

    kind: str
    linear_offset: float = 0.0
    clamp: float | None = None

    @property
    def is_gated(self) -> bool:
        return self.kind in GATED


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# y = f(gate) * up, gate and up the halves of the last dimension.
GATED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": _gelu,
    "quick_geglu": _quick_gelu,
}
# y = f(x).
PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "squared_relu": lambda x: F.relu(x).square(),
}
_FUNCTIONS = {**GATED, **PLAIN}


def _gelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    dx: Tensor = aten.gelu_backward(dy, x, approximate="tanh")
    return dx


def _quick_gelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    share = torch.sigmoid(1.702 * x)
    dx: Tensor = dy * share + 1.702 * aten.sigmoid_backward(dy * x, share)
    return dx


# dy f'(x).
_GRADIENTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": aten.silu_backward,
    "geglu": _gelu_gradient,
    "quick_geglu": _quick_gelu_gradient,
    "gelu": _gelu_gradient,
    "squared_relu": lambda dy, x: 2 * dy * F.relu(x),
}


def definition(x: Tensor, bias: Tensor | None, weights: Tensor | None, spec: ActivationSpec) -> Tensor:
    """f(x + bias) * weights in x's dtype."""
    dtype = precision(x.dtype)
    wide = x.to(dtype)  # [..., W]
    if bias is not None:
        wide = wide + bias.to(dtype)  # [W]
    if spec.is_gated:
        gate, up = wide.chunk(2, dim=-1)  # [..., W / 2] each
        if spec.clamp is not None:
            gate, up = gate.clamp(max=spec.clamp), up.clamp(-spec.clamp, spec.clamp)
        y = GATED[spec.kind](gate) * (up + spec.linear_offset)
    else:
        y = PLAIN[spec.kind](wide)
    if weights is not None:
        y = y * weights.to(dtype)  # [..., 1]
    return y.to(x.dtype)


def activation(x: Tensor, bias: Tensor | None, weights: Tensor | None, spec: ActivationSpec) -> Tensor:
    """Recomputes in backward: autograd would save fp32 intermediates."""
    if torch.compiler.is_compiling():
        return definition(x, bias, weights, spec)
    y: Tensor = autograd.apply(_RECOMPUTED, (x, bias, weights), spec)
    return y


def _forward(inputs: Any, spec: ActivationSpec) -> tuple[Tensor, autograd.Inputs]:
    x, bias, weights = inputs
    parts = [definition(rows, bias, w, spec) for rows, w in _blocks(x, weights)]
    return _joined(parts).view(*x.shape[:-1], parts[0].shape[-1]), inputs


def _backward(dy: Tensor, saved: Any, spec: ActivationSpec, wanted: Sequence[bool]) -> autograd.Inputs:
    x, bias, weights = saved
    found: list[list[Tensor]] = [[], [], []]
    for (rows, w), (grad, _) in zip(_blocks(x, weights), _blocks(dy, None, x.shape[-1]), strict=True):
        dx, dw = _gradients(grad, rows, bias, w, spec, wanted[2])
        if dw is not None:
            found[2].append(dw)
        if wanted[1]:
            found[1].append(dx.sum(0))
        found[0].append(dx.to(x.dtype))
    return (
        _joined(found[0]).view(x.shape) if wanted[0] else None,
        # Summed in fp32.
        torch.stack(found[1]).sum(0).to(bias.dtype) if wanted[1] else None,
        _joined(found[2]).view(weights.shape) if wanted[2] else None,
    )


def _gradients(
    dy: Tensor, x: Tensor, bias: Tensor | None, weights: Tensor | None, spec: ActivationSpec, wants_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x, in fp32 (float64 for float64), and of the weights."""
    dtype = precision(x.dtype)
    dy, wide = dy.to(dtype), x.to(dtype)
    if bias is not None:
        wide = wide + bias.to(dtype)
    gate, up = wide.chunk(2, dim=-1) if spec.is_gated else (wide, None)
    outside = None
    if spec.clamp is not None and up is not None:
        outside = gate > spec.clamp, up.abs() > spec.clamp
        gate, up = gate.clamp(max=spec.clamp), up.clamp(-spec.clamp, spec.clamp)
    if spec.linear_offset and up is not None:
        up = up + spec.linear_offset
    value, dw = _FUNCTIONS[spec.kind](gate), None
    if weights is not None:
        if wants_weights:
            dw = (dy * (value if up is None else value * up)).sum(-1, keepdim=True).to(weights.dtype)
        dy = dy * weights.to(dtype)
    if up is None:
        return _GRADIENTS[spec.kind](dy, gate), dw
    parts = [_GRADIENTS[spec.kind](dy * up, gate), dy * value]
    if outside is not None:
        parts = [part.masked_fill(mask, 0.0) for part, mask in zip(parts, outside, strict=True)]
    return torch.cat(parts, -1), dw


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _blocks(x: Tensor, weights: Tensor | None, width: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Rows of x and their weights, in cache-sized blocks on a CPU."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    w = None if weights is None else weights.reshape(-1, 1)
    in_cache = x.device.type == "cpu" and not traced.dry
    step = max(1, _BLOCK // max(width or x.shape[-1], 1) if in_cache else len(rows))
    for start in range(0, max(1, len(rows)), step):
        yield rows[start : start + step], None if w is None else w[start : start + step]


_RECOMPUTED = autograd.Kernel(_forward, _backward)
