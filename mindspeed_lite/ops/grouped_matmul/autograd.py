"""grouped_matmul with gradients: one node for all experts, on the products that a backend brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops.grouped_matmul.groups import Counts

Tensors = Sequence[torch.Tensor]

# From dy [T, N], x [T, K] and counts to a gradient per weight, or None where it is kept elsewhere.
TakeGradients = Callable[[torch.Tensor, torch.Tensor, Counts], Sequence[torch.Tensor | None]]


class Products(NamedTuple):
    """What a backend computes, without gradients.

    forward(x [T, K], weights, counts, biases or None, transposed) -> y [T, N], contiguous
    weight_gradients(dy [T, N], x [T, K], counts) -> E tensors [N, K], zeros for an expert without rows
    """

    forward: Callable[[torch.Tensor, Tensors, Any, Tensors | None, bool], torch.Tensor]
    weight_gradients: Callable[[torch.Tensor, torch.Tensor, Any], Tensors]


def run(
    products: Products,
    x: torch.Tensor,
    weights: Tensors | torch.Tensor,
    counts: Counts,
    biases: Tensors | None,
    transposed: bool,
    take_gradients: TakeGradients | None,
) -> torch.Tensor:
    """The product, recorded for the backward pass where one may follow."""
    # One tensor of all weights has one gradient.
    given = (weights,) if isinstance(weights, torch.Tensor) else tuple(weights)
    both = (*given, *(biases or ()))
    if torch.is_grad_enabled() and (x.requires_grad or any(each.requires_grad for each in both)):
        stacked = isinstance(weights, torch.Tensor)
        y: torch.Tensor = _GroupedMatmul.apply(  # type: ignore[no-untyped-call]
            x, counts, products, transposed, take_gradients, stacked, len(given), *both
        )
        return y
    return products.forward(
        x, given[0].unbind() if isinstance(weights, torch.Tensor) else given, counts, biases, transposed
    )


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        counts: Counts,
        products: Products,
        transposed: bool,
        take_gradients: TakeGradients | None,
        stacked: bool,
        number: int,
        *both: torch.Tensor,
    ) -> torch.Tensor:
        weights, biases = both[:number], both[number:]
        kept = (counts,) if isinstance(counts, torch.Tensor) else ()
        ctx.save_for_backward(x, *weights, *kept)
        ctx.counts = None if kept else counts
        ctx.products, ctx.transposed, ctx.stacked, ctx.number = products, transposed, stacked, number
        ctx.take_gradients = take_gradients
        return products.forward(x, weights[0].unbind() if stacked else weights, counts, biases or None, transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        counts = weights.pop() if ctx.counts is None else ctx.counts
        wants_x, wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[7:]
        wants_weights, wants_biases = any(wanted[: ctx.number]), any(wanted[ctx.number :])
        products, transposed = ctx.products, ctx.transposed
        dx: torch.Tensor | None = None
        dweights: Sequence[torch.Tensor | None] = [None] * ctx.number
        dbiases: Sequence[torch.Tensor | None] = [None] * (len(wanted) - ctx.number)
        if wants_x:
            dx = products.forward(dy, weights[0].unbind() if ctx.stacked else weights, counts, None, not transposed)
        if wants_weights and ctx.take_gradients is not None:
            dweights = ctx.take_gradients(dy, x, counts)
        elif wants_weights:
            found = products.weight_gradients(*((dy, x) if transposed else (x, dy)), counts)
            dweights = [torch.stack(found)] if ctx.stacked else found
        if wants_biases:
            # A bias is the weight of an input of ones.
            found = products.weight_gradients(dy, dy.new_ones(dy.shape[0], 1), counts)
            dbiases = [each.squeeze(-1) for each in found]
        parts = [each if wants else None for each, wants in zip((*dweights, *dbiases), wanted, strict=True)]
        return (dx, None, None, None, None, None, None, *parts)
