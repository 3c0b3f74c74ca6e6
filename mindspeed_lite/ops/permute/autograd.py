"""Autograd of permute and unpermute: each gradient uses the other direction's kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mindspeed_lite.ops import autograd
from mindspeed_lite.ops.permute import rows


class Kernels(NamedTuple):
    """Kernels of a backend: any strides in, contiguous out.

    row_ids(routing_map, count, capacity) -> row ids
    spread(tokens [T, H], row_ids, count) -> [count, H], tokens copied to their rows
    gather(permuted [P, H], row_ids, tokens, probs) -> [T, H], (weighted) sums over each token's rows
    backward(dy [T, H], permuted or None, row_ids, probs) -> d permuted, and d probs if `permuted` is given
    """

    row_ids: Callable[[Tensor, int, int | None], Tensor]
    spread: Callable[[Tensor, Tensor, int], Tensor]
    gather: Callable[[Tensor, Tensor, int, Tensor | None], Tensor]
    backward: Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def differentiable(kernels: Kernels) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """permute and unpermute of a backend."""

    def permute(
        tokens: Tensor, routing_map: Tensor, probs: Tensor | None, count: int, capacity: int | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        row_ids = kernels.row_ids(routing_map, count, capacity)
        permuted = autograd.apply(_PERMUTE, (tokens, row_ids), (kernels, count, tokens.shape[0]))
        if probs is None:
            return permuted, None, row_ids
        return permuted, probs.reshape(-1).index_select(0, rows.split(row_ids, count).pair), row_ids

    def unpermute(permuted: Tensor, row_ids: Tensor, tokens: int, probs: Tensor | None, *_: Any) -> Tensor:
        options = (kernels, permuted.shape[0], tokens)
        out: Tensor = autograd.apply(_UNPERMUTE, (permuted, probs, row_ids), options)
        return out

    return permute, unpermute


# Kernels, rows and tokens.
_Options = tuple[Kernels, int, int]


def _permute(inputs: Any, options: _Options) -> tuple[Tensor, autograd.Inputs]:
    (tokens, row_ids), (kernels, count, _) = inputs, options
    return kernels.spread(tokens, row_ids, count), (row_ids,)


def _permute_backward(dy: Tensor, saved: Any, options: _Options, wanted: Sequence[bool]) -> autograd.Inputs:
    kernels, _, tokens = options
    return kernels.gather(dy, saved[0], tokens, None), None


def _unpermute(inputs: Any, options: _Options) -> tuple[Tensor, autograd.Inputs]:
    (permuted, probs, row_ids), (kernels, _, tokens) = inputs, options
    # Only the gradient of probs reads the rows.
    kept = permuted if probs is not None and probs.requires_grad else None
    return kernels.gather(permuted, row_ids, tokens, probs), (row_ids, probs, kept)


def _unpermute_backward(dy: Tensor, saved: Any, options: _Options, wanted: Sequence[bool]) -> autograd.Inputs:
    (row_ids, probs, permuted), (kernels, count, _) = saved, options
    if probs is None:
        return kernels.spread(dy, row_ids, count), None, None
    return (*kernels.backward(dy, permuted, row_ids, probs), None)


_PERMUTE = autograd.Kernel(_permute, _permute_backward)
_UNPERMUTE = autograd.Kernel(_unpermute, _unpermute_backward)
