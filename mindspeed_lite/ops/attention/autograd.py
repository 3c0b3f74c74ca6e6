"""Autograd around a backend's forward and backward kernels, with the sink, which no kernel has to know.

A sink is one more key whose value is nothing. A kernel's result without it becomes the result with it by the rule
for putting two sets of keys together, and the kernel's backward needs the new output and log-sum-exp only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention.spec import AttentionSpec

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Kernels(NamedTuple):
    """What a backend computes without autograd; arguments and results as in the package's functions."""

    forward: Callable[..., Pair]
    backward: Callable[..., Triple]


def attention(kernels: Kernels, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> Pair:
    """(out, lse), differentiable through `out` in q, k, v and the sink."""
    sink = spec.sink
    needed = q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    if needed and torch.is_grad_enabled():
        pair: Pair = _Attention.apply(kernels, q, k, v, sink, spec.mask, spec)  # type: ignore[no-untyped-call]
        return pair
    out, lse = kernels.forward(q, k, v, spec)
    return (out, lse) if sink is None else with_sink(out, lse, sink)


def with_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> Pair:
    """out [sq, b, n, dv] and lse [b, n, sq] once each row has the logit `sink` [n] besides its keys."""
    whole = torch.logaddexp(lse, sink.to(lse.dtype).unsqueeze(-1))
    share = (lse - whole).exp_().permute(2, 0, 1).unsqueeze(-1)  # [sq, b, n, 1]
    return (out * share).to(out.dtype), whole


def sink_gradient(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """-sum over rows of p_sink * (dout . out): the sink's own value adds nothing to dp."""
    delta = (dout.to(lse.dtype) * out).sum(-1).permute(1, 2, 0)  # [b, n, sq]
    weight = (sink.to(lse.dtype).unsqueeze(-1) - lse).exp_()
    return -(weight * delta).sum((0, 2)).to(sink.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        mask: torch.Tensor | None,
        spec: AttentionSpec,
    ) -> Pair:
        out, lse = kernels.forward(q, k, v, spec)
        if sink is not None:
            out, lse = with_sink(out, lse, sink)
        ctx.save_for_backward(q, k, v, sink, mask, out, lse)
        # Tensors are autograd's to keep: it frees them, sees writes to them and lets hooks move them.
        ctx.spec = spec if mask is None and sink is None else spec._replace(mask=None, sink=None)
        ctx.kernels = kernels
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
        nothing = (None,) * 7
        if dout is None:
            return nothing
        q, k, v, sink, mask, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:5]
        dq = dk = dv = dsink = None
        if any(wanted[:3]):
            spec = ctx.spec if mask is None else ctx.spec._replace(mask=mask)
            dq, dk, dv = ctx.kernels.backward(dout, q, k, v, out, lse, spec)
        if wanted[3]:
            dsink = sink_gradient(dout, out, lse, sink)
        gradients = (grad if want else None for grad, want in zip((dq, dk, dv, dsink), wanted, strict=True))
        return (None, *gradients, *nothing[5:])
