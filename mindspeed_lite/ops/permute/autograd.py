"""Autograd of permute and unpermute: each gradient uses the other direction's kernel.

A backend has four functions, with any strides in and contiguous out:

    row_ids(routing_map, count, capacity) -> row ids
    spread(tokens [T, H], row_ids, count) -> [count, H], tokens copied to their rows
    gather(permuted [P, H], row_ids, tokens, probs) -> [T, H], (weighted) sums over each token's rows
    backward(dy [T, H], permuted or None, row_ids, probs) -> d permuted, and d probs if `permuted` is given
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mindspeed_lite.ops import autograd
from mindspeed_lite.ops.permute import rows


def differentiable(backend: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """permute and unpermute of the backend module of this name."""
    kernels = sys.modules[backend]
    return functools.partial(_permute, kernels), functools.partial(_unpermute, kernels)


def _permute(
    kernels: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor | None, count: int, capacity: int | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    row_ids = kernels.row_ids(routing_map, count, capacity)
    permuted = autograd.apply(_PERMUTE, (tokens, row_ids), (kernels, count, tokens.shape[0]))
    if probs is None:
        return permuted, None, row_ids
    return permuted, probs.reshape(-1).index_select(0, rows.split(row_ids, count).pair), row_ids


def _unpermute(kernels: Any, permuted: Tensor, row_ids: Tensor, tokens: int, probs: Tensor | None, *_: Any) -> Tensor:
    out: Tensor = autograd.apply(_UNPERMUTE, (permuted, probs, row_ids), (kernels, permuted.shape[0], tokens))
    return out


# Kernels, rows and tokens.
_Options = tuple[Any, int, int]


def _spread(inputs: Any, options: _Options) -> tuple[Tensor, autograd.Inputs]:
    (tokens, row_ids), (kernels, count, _) = inputs, options
    return kernels.spread(tokens, row_ids, count), (row_ids,)


def _spread_backward(dy: Tensor, saved: Any, options: _Options, wanted: Sequence[bool]) -> autograd.Inputs:
    kernels, _, tokens = options
    return kernels.gather(dy, saved[0], tokens, None), None


def _gather(inputs: Any, options: _Options) -> tuple[Tensor, autograd.Inputs]:
    (permuted, probs, row_ids), (kernels, _, tokens) = inputs, options
    # Only the gradient of probs reads the rows.
    kept = permuted if probs is not None and probs.requires_grad else None
    return kernels.gather(permuted, row_ids, tokens, probs), (row_ids, probs, kept)


def _gather_backward(dy: Tensor, saved: Any, options: _Options, wanted: Sequence[bool]) -> autograd.Inputs:
    (row_ids, probs, permuted), (kernels, count, _) = saved, options
    if probs is None:
        return kernels.spread(dy, row_ids, count), None, None
    return (*kernels.backward(dy, permuted, row_ids, probs), None)


_PERMUTE = autograd.Kernel(_spread, _spread_backward)
_UNPERMUTE = autograd.Kernel(_gather, _gather_backward)
