"""Autograd around a backend's forward and backward kernels, with the sink.

A sink is one more key without a value. It merges into out and lse like a second set of keys; the kernel's backward
reads only the merged results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops import autograd
from mindspeed_lite.ops.attention.spec import AttentionSpec

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


class Kernels(NamedTuple):
    """A backend's functions without autograd."""

    forward: Callable[..., Pair]
    backward: Callable[..., Triple]


def attention(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """The output, differentiable in q, k, v and the sink."""
    # Saved tensors must go through autograd: it frees them, checks versions and runs hooks.
    options = kernels, spec._replace(mask=None, sink=None)
    out: Tensor = autograd.apply(_ATTENTION, (q, k, v, spec.sink, spec.mask), options)
    return out


def pad(t: Tensor, width: int) -> Tensor:
    """`t` with zeros up to `width` in its last dimension."""
    return torch.nn.functional.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Pair:
    """Merges the logit `sink` [n] into out [sq, b, n, dv] and lse [b, n, sq]."""
    whole = torch.logaddexp(lse, sink.to(lse.dtype).unsqueeze(-1))
    share = (lse - whole).exp_().permute(2, 0, 1).unsqueeze(-1)  # [sq, b, n, 1]
    return (out * share).to(out.dtype), whole


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """-sum over rows of p_sink * (dout . out)."""
    delta = (dout.to(lse.dtype) * out).sum(-1).permute(1, 2, 0)  # [b, n, sq]
    weight = (sink.to(lse.dtype).unsqueeze(-1) - lse).exp_()
    return -(weight * delta).sum((0, 2)).to(sink.dtype)


def _forward(inputs: Any, options: tuple[Kernels, AttentionSpec]) -> tuple[Tensor, autograd.Inputs]:
    kernels, spec = options
    q, k, v, sink, mask = inputs
    out, lse = kernels.forward(q, k, v, spec._replace(mask=mask))
    if sink is not None:
        out, lse = with_sink(out, lse, sink)
    out = out.to(q.dtype)
    return out, (*inputs, out, lse)


def _backward(
    dout: Tensor, saved: Any, options: tuple[Kernels, AttentionSpec], wanted: Sequence[bool]
) -> autograd.Inputs:
    kernels, spec = options
    q, k, v, sink, mask, out, lse = saved
    dq = dk = dv = None
    if any(wanted[:3]):
        gradients = kernels.backward(dout, q, k, v, out, lse, spec._replace(mask=mask))
        dq, dk, dv = (gradient.to(q.dtype) for gradient in gradients)
    return dq, dk, dv, sink_gradient(dout, out, lse, sink) if wanted[3] else None, None


_ATTENTION = autograd.Kernel(_forward, _backward)
