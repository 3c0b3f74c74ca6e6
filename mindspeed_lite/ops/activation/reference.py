"""Reference activation in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_lite.ops import autograd, traced
from mindspeed_lite.ops.rows import precision

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
    return torch.cat(parts).view(*x.shape[:-1], parts[0].shape[-1]), inputs


def _backward(dy: Tensor, saved: Any, spec: ActivationSpec, wanted: Sequence[bool]) -> autograd.Inputs:
    x, bias, weights = saved
    dtype = precision(x.dtype)
    # fp32, so that gradients of blocks are summed in fp32.
    wide_bias = None if bias is None else bias.detach().to(dtype).requires_grad_(wanted[1])
    found: list[list[Tensor]] = [[], [], []]
    for (rows, w), (grad, _) in zip(_blocks(x, weights), _blocks(dy, None, x.shape[-1]), strict=True):
        rows = rows.detach().requires_grad_(wanted[0])
        w = None if w is None else w.detach().requires_grad_(wanted[2])
        # Hooks that count or move activations must not see what lives for a block.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
            y = definition(rows, wide_bias, w, spec)
        leaves = [(n, leaf) for n, leaf in enumerate((rows, wide_bias, w)) if leaf is not None and wanted[n]]
        for (n, _), gradient in zip(leaves, torch.autograd.grad(y, [leaf for _, leaf in leaves], grad), strict=True):
            found[n].append(gradient)
    return (
        torch.cat(found[0]).view(x.shape) if wanted[0] else None,
        torch.stack(found[1]).sum(0).to(bias.dtype) if wanted[1] else None,
        torch.cat(found[2]).view(weights.shape) if wanted[2] else None,
    )


def _unchanged(saved: Tensor) -> Tensor:
    return saved


def _blocks(x: Tensor, weights: Tensor | None, width: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Rows of x and their weights, in cache-sized blocks on a CPU."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    w = None if weights is None else weights.reshape(-1, 1)
    in_cache = x.device.type == "cpu" and not traced.dry
    step = max(1, _BLOCK // max(width or x.shape[-1], 1) if in_cache else len(rows))
    for start in range(0, max(1, len(rows)), step):
        yield rows[start : start + step], None if w is None else w[start : start + step]


_RECOMPUTED = autograd.Kernel(_forward, _backward)
