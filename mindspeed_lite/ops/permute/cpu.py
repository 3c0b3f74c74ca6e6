"""permute on CPU in C++; row sums in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lite.ops import native
from mindspeed_lite.ops.permute import autograd, reference, rows
from mindspeed_lite.ops.rows import as_rows

LIBRARY = native.Library(__file__)
DTYPES = native.DTYPES


def row_ids(routing_map: Tensor, count: int, capacity: int | None) -> Tensor:
    tokens, experts = routing_map.shape
    flags = routing_map.contiguous()
    ids = torch.empty(rows.size(count, tokens), dtype=torch.int32)
    if capacity is None:
        LIBRARY.row_ids(flags, ids, tokens, experts, count)
        if ids[-1] >= 0:
            return ids
    # Unrouted pairs as padding.
    return rows.of_pairs(reference.pairs(routing_map, count, capacity), tokens, experts)


def spread(tokens: Tensor, row_ids: Tensor, count: int) -> Tensor:
    x, stride = as_rows(tokens)
    size = x.element_size()
    out = x.new_empty(count, x.shape[1])
    bounds = (x.shape[0], count, x.shape[1] * size, stride * size)
    LIBRARY.spread(x, row_ids, out, *bounds, native.threads(out.numel()))
    return out


def gather(permuted: Tensor, row_ids: Tensor, tokens: int, probs: Tensor | None) -> Tensor:
    x, stride = as_rows(permuted)
    weights = None if probs is None else _weights(probs)
    out = x.new_empty(tokens, x.shape[1])
    kernel = LIBRARY.kernel("gather", x.dtype)
    kernel(x, row_ids, weights, out, tokens, *x.shape, stride, native.threads(x.numel()))
    return out


def backward(dy: Tensor, permuted: Tensor | None, row_ids: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None]:
    g, g_stride = as_rows(dy)
    x, x_stride = (None, 0) if permuted is None else as_rows(permuted)
    weights = _weights(probs)
    count = (row_ids.numel() - g.shape[0] - 1) // 2
    dpermuted = g.new_empty(count, g.shape[1])
    dprobs = None if x is None else torch.zeros_like(weights)
    LIBRARY.kernel("backward", g.dtype)(
        g,
        x,
        row_ids,
        weights,
        dpermuted,
        dprobs,
        g.shape[0],
        count,
        g.shape[1],
        g_stride,
        x_stride,
        native.threads(dpermuted.numel()),
    )
    return dpermuted, None if dprobs is None else dprobs.to(probs.dtype)


def _weights(probs: Tensor) -> Tensor:
    return probs.detach().to(torch.float32).contiguous()


permute, unpermute = autograd.differentiable(__name__)
