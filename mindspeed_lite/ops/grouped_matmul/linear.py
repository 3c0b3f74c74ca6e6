"""One linear layer per expert as one operation, whose weight gradients go where the caller wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_lite.ops.grouped_matmul import Counts, grouped_matmul, weight_gradients

# From dy [T, N], x [T, K] and counts to a gradient per weight, or None where it is kept elsewhere.
TakeGradients = Callable[[torch.Tensor, torch.Tensor, Counts], Sequence[torch.Tensor | None]]


def grouped_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], counts: Counts, take_gradients: TakeGradients | None = None
) -> torch.Tensor:
    """y_e = x_e w_e^T as `grouped_matmul` computes it, differentiable in x and the weights.

    x: [T, K], sorted by expert; weights: E tensors [N, K]; counts: [E]; y: [T, N]. `take_gradients` is called once in
    the backward pass and returns what autograd is given for each weight; without it that is `weight_gradients`. Saves
    x, and the weights, as they are.
    """
    y: torch.Tensor = _GroupedLinear.apply(x, counts, take_gradients, *weights)  # type: ignore[no-untyped-call]
    return y


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: Counts, take: TakeGradients | None, *weights: Any) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.counts, ctx.take = counts, take
        return grouped_matmul(x, weights, counts)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        counts, wanted = ctx.counts, ctx.needs_input_grad
        dx = grouped_matmul(dy, weights, counts, transposed=False) if wanted[0] else None
        gradients: Sequence[torch.Tensor | None] = [None] * len(weights)
        if any(wanted[3:]):
            gradients = (ctx.take or weight_gradients)(dy, x, counts)
        return dx, None, None, *gradients
