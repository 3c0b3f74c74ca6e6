"""activation with gradients, keeping nothing but its inputs: what the backends with a backward of their own share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Form(NamedTuple):
    """What is computed of the tensors."""

    kind: str
    linear_offset: float
    clamp: float | None


class Pass(NamedTuple):
    """A backend's two directions.

    forward(x, bias, weights, form) -> y
    backward(dy, x, bias, weights, form, wanted) -> the gradients of x, bias and weights that are wanted, else None
    """

    forward: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None, Form], torch.Tensor]
    backward: Callable[..., Gradients]


def run(
    backend: Pass, x: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor | None, form: Form
) -> torch.Tensor:
    """The forward pass, recorded for the backward pass where one may follow."""
    if torch.is_grad_enabled() and (
        x.requires_grad or (bias is not None and bias.requires_grad) or (weights is not None and weights.requires_grad)
    ):
        y: torch.Tensor = _Activation.apply(x, bias, weights, form, backend)  # type: ignore[no-untyped-call]
        return y
    return backend.forward(x, bias, weights, form)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        weights: torch.Tensor | None,
        form: Form,
        backend: Pass,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, bias, weights)
        ctx.form, ctx.backend = form, backend
        return backend.forward(x, bias, weights, form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*ctx.backend.backward(dy, *ctx.saved_tensors, ctx.form, ctx.needs_input_grad[:3]), None, None)


class Rows(NamedTuple):
    """x as `number` rows of `width` elements side by side, each `stride` elements from the one before."""

    data: torch.Tensor
    number: int
    width: int
    stride: int


def rows(x: torch.Tensor) -> Rows:
    """Without a copy where strides allow it."""
    number, width = math.prod(x.shape[:-1]), x.shape[-1]
    if x.is_contiguous():
        return Rows(x, number, width, width)
    flat = x.reshape(number, width)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    return Rows(flat, number, width, flat.stride(0))
