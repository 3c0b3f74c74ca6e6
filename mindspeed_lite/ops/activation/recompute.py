"""The definition of activation with less memory: its intermediate tensors are computed again in the backward pass.

What a device computes that has no kernel for a call. Autograd would keep the widened input and every intermediate
result of the definition, in fp32.
"""

from __future__ import annotations

import torch

from mindspeed_lite.ops.activation import autograd, reference


def activation(
    x: torch.Tensor,
    kind: str,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    linear_offset: float = 0.0,
    clamp: float | None = None,
) -> torch.Tensor:
    if torch.compiler.is_compiling():
        # A compiler decides itself what to keep and what to compute again.
        return reference.activation(x, kind, bias, weights, linear_offset, clamp)
    return autograd.run(_PASS, x, bias, weights, autograd.Form(kind, linear_offset, clamp))


def _forward(
    x: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor | None, form: autograd.Form
) -> torch.Tensor:
    return reference.activation(x, form.kind, bias, weights, form.linear_offset, form.clamp)


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    form: autograd.Form,
    wanted: tuple[bool, bool, bool],
) -> autograd.Gradients:
    x = x.detach().requires_grad_(wanted[0])
    bias = None if bias is None else bias.detach().requires_grad_(wanted[1])
    weights = None if weights is None else weights.detach().requires_grad_(wanted[2])
    with torch.enable_grad():
        y = reference.activation(x, form.kind, bias, weights, form.linear_offset, form.clamp)
    leaves = [leaf for leaf, want in zip((x, bias, weights), wanted, strict=True) if leaf is not None and want]
    found = iter(torch.autograd.grad(y, leaves, dy))
    dx, dbias, dweights = (next(found) if want else None for want in wanted)
    return dx, dbias, dweights


_PASS = autograd.Pass(_forward, _backward)
