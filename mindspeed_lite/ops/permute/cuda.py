"""permute on CUDA: Triton kernels without synchronisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops.permute import autograd, kernels, rows
from mindspeed_lite.ops.row_kernels import cdiv, next_power_of_2, on
from mindspeed_lite.ops.rows import as_rows

# Pairs per row-id program, columns per copy program (16 bytes of a 16-bit tensor per thread).
_PAIRS, _BLOCK = 1024, 1024


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def row_ids(routing_map: Tensor, count: int, capacity: int | None) -> Tensor:
    tokens, experts = routing_map.shape
    device = routing_map.device
    flags = routing_map.contiguous().view(torch.uint8)
    width = next_power_of_2(experts)
    block = max(1, min(_PAIRS // width, next_power_of_2(tokens)))
    blocks = cdiv(tokens, block)
    ids = torch.empty(rows.size(count, tokens), dtype=torch.int32, device=device)
    pair, order, offsets = rows.split(ids, count)
    counts = torch.empty(experts, blocks, dtype=torch.int32, device=device)
    how: dict[str, Any] = {"TOKENS": block, "EXPERTS": width, "num_warps": 4}
    with on(routing_map):
        kernels.count_kernel[(blocks,)](flags, counts, tokens, experts, blocks, **how)
        if capacity is None:
            ends, ranks = counts.view(-1).cumsum(0, dtype=torch.int32), (count, 0, tokens)
        else:
            ends, ranks = counts.cumsum(1, dtype=torch.int32), (capacity, capacity, 0)
        sizes = (tokens, experts, blocks, *ranks)
        kernels.pair_kernel[(blocks,)](flags, ends, pair, offsets, *sizes, **how)
        torch.cumsum(offsets[1:], 0, dtype=torch.int32, out=offsets[1:])
        kernels.order_kernel[(blocks,)](flags, ends, offsets, order, *sizes, **how)
    return ids


def spread(tokens: Tensor, row_ids: Tensor, count: int) -> Tensor:
    x, stride = as_rows(tokens)
    width = x.shape[1]
    out = x.new_empty(count, width)
    _, order, offsets = rows.split(row_ids, count)
    grid, how = _launch(x.shape[0], width)
    with on(x):
        kernels.spread_kernel[grid](x, order, offsets, out, stride, **how)
    return out


def gather(permuted: Tensor, row_ids: Tensor, tokens: int, probs: Tensor | None) -> Tensor:
    x, stride = as_rows(permuted)
    count, width = x.shape
    out = x.new_empty(tokens, width)
    pair, order, offsets = rows.split(row_ids, count)
    weights = None if probs is None else probs.contiguous()
    grid, how = _launch(tokens, width)
    with on(x):
        kernels.gather_kernel[grid](x, order, offsets, pair, weights, out, stride, HAS_PROBS=weights is not None, **how)
    return out


def backward(dy: Tensor, permuted: Tensor | None, row_ids: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None]:
    g, g_stride = as_rows(dy)
    x, x_stride = (None, 0) if permuted is None else as_rows(permuted)
    tokens, width = g.shape
    count = (row_ids.numel() - tokens - 1) // 2
    pair, order, offsets = rows.split(row_ids, count)
    weights = probs.contiguous()
    dx = g.new_empty(count, width)
    dprobs = None if x is None else torch.zeros_like(weights)
    (grid, _), how = _launch(tokens, width)
    how["WANTS_DPROBS"] = x is not None
    with on(g):
        kernels.backward_kernel[(grid,)](g, x, order, offsets, pair, weights, dx, dprobs, g_stride, x_stride, **how)
    return dx, dprobs


permute, unpermute = autograd.differentiable(__name__)


def _launch(tokens: int, width: int) -> tuple[tuple[int, int], dict[str, Any]]:
    block = min(_BLOCK, next_power_of_2(width))
    return (tokens, cdiv(width, block)), {"WIDTH": width, "BLOCK": block, "num_warps": max(1, block // 256)}
