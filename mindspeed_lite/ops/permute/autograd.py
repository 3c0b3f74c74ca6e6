"""permute and unpermute with gradients, of a backend's kernels. Each gradient is a kernel of the other direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops.permute import rows


class Kernels(NamedTuple):
    """A backend's passes over memory. Tensors are whatever strides they come in, results contiguous.

    row_ids(routing_map, count, capacity) -> row ids
    spread(tokens [T, H], row_ids, count) -> [count, H], every token copied to its rows
    gather(permuted [P, H], row_ids, tokens, probs) -> [T, H], the (weighted) sums over each token's rows
    backward(dy [T, H], permuted or None, row_ids, probs) -> d permuted, and d probs if `permuted` is given
    """

    row_ids: Callable[[torch.Tensor, int, int | None], torch.Tensor]
    spread: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    gather: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor | None], torch.Tensor]
    backward: Callable[
        [torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]
    ]


def permute(
    kernels: Kernels,
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None,
    count: int,
    capacity: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    row_ids = kernels.row_ids(routing_map, count, capacity)
    permuted = _Permute.apply(tokens, row_ids, count, kernels)  # type: ignore[no-untyped-call]
    if probs is None:
        return permuted, None, row_ids
    return permuted, probs.reshape(-1).index_select(0, rows.split(row_ids, count).pair), row_ids


def unpermute(
    kernels: Kernels, permuted: torch.Tensor, row_ids: torch.Tensor, tokens: int, probs: torch.Tensor | None
) -> torch.Tensor:
    out: torch.Tensor = _Unpermute.apply(permuted, probs, row_ids, tokens, kernels)  # type: ignore[no-untyped-call]
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, row_ids: torch.Tensor, count: int, kernels: Kernels) -> torch.Tensor:
        ctx.save_for_backward(row_ids)
        ctx.tokens, ctx.kernels = tokens.shape[0], kernels
        return kernels.spread(tokens, row_ids, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (row_ids,) = ctx.saved_tensors
        return ctx.kernels.gather(dy, row_ids, ctx.tokens, None), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        permuted: torch.Tensor,
        probs: torch.Tensor | None,
        row_ids: torch.Tensor,
        tokens: int,
        kernels: Kernels,
    ) -> torch.Tensor:
        # The rows are wanted again by the gradient of probs alone.
        ctx.save_for_backward(row_ids, probs, permuted if ctx.needs_input_grad[1] else None)
        ctx.count, ctx.kernels = permuted.shape[0], kernels
        return kernels.gather(permuted, row_ids, tokens, probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        row_ids, probs, permuted = ctx.saved_tensors
        if probs is None:
            return ctx.kernels.spread(dy, row_ids, ctx.count), None, None, None, None
        return (*ctx.kernels.backward(dy, permuted, row_ids, probs), None, None, None)
