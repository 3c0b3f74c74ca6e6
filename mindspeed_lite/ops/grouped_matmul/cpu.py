"""grouped_matmul on CPU: a product per expert straight into its place, without a node of autograd for each.

Numbers of 16 bits that the processor does not multiply as such are widened for one expert at a time, into buffers
that are used for all and stay in the cache, multiplied in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mindspeed_lite.ops import cpu_products
from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad
from mindspeed_lite.ops.grouped_matmul import autograd, groups, reference

if TYPE_CHECKING:
    from mindspeed_lite.ops.grouped_matmul import Case

Tensors = Sequence[torch.Tensor]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def supported(case: Case) -> list[str]:
    return [] if case.dtype in _DTYPES else [f"dtype {case.dtype}: there are products of floating-point numbers"]


def grouped_matmul(
    x: torch.Tensor,
    weights: Tensors | torch.Tensor,
    counts: groups.Counts,
    biases: Tensors | None = None,
    transposed: bool = True,
) -> torch.Tensor:
    if autograd.is_traced(x):
        return reference.grouped_matmul(x, weights, counts, biases, transposed)
    return autograd.run(_PRODUCTS, x, weights, groups.on_host(counts, x.shape[0]), biases, transposed)


def weight_gradients(dy: torch.Tensor, x: torch.Tensor, counts: groups.Counts) -> Sequence[torch.Tensor]:
    if autograd.is_traced(x):
        return reference.weight_gradients(dy, x, counts)
    return _weight_gradients(dy, x, groups.on_host(counts, x.shape[0]))


def accumulate_weight_gradients(main_grads: Tensors, dy: torch.Tensor, x: torch.Tensor, counts: groups.Counts) -> None:
    if autograd.is_traced(x):
        reference.accumulate_weight_gradients(main_grads, dy, x, counts)
        return
    sizes = groups.on_host(counts, x.shape[0])
    if _multiplies(x.dtype):
        for expert, rows in groups.slices(sizes):
            accumulate_wgrad(main_grads[expert], dy[rows], x[rows])
        return
    dtype = reference.wide(x.dtype)
    wide_dy, wide_x = _buffer(max(sizes), dy, dtype), _buffer(max(sizes), x, dtype)
    rounded = main_grads[0].dtype != dtype
    for expert, rows in groups.slices(sizes):
        size = rows.stop - rows.start
        factors = wide_dy[:size].copy_(dy[rows]).t(), wide_x[:size].copy_(x[rows])
        main_grad = main_grads[expert]
        main_grad.add_(torch.mm(*factors)) if rounded else main_grad.addmm_(*factors)


def _forward(
    x: torch.Tensor, weights: Tensors, counts: Sequence[int], biases: Tensors | None, transposed: bool
) -> torch.Tensor:
    width = weights[0].shape[0 if transposed else 1]
    y = torch.empty(x.shape[0], width, dtype=x.dtype)
    direct, dtype = _multiplies(x.dtype), reference.wide(x.dtype)
    if not direct:
        longest = max(counts)
        wide_x, wide_y = _buffer(longest, x, dtype), _buffer(longest, y, dtype)
        wide_weight = torch.empty(weights[0].shape, dtype=dtype)
    for expert, rows in groups.slices(counts):
        left, weight, out = x[rows], weights[expert], y[rows]
        bias = None if biases is None else biases[expert]
        if not direct:
            size = rows.stop - rows.start
            left, weight, out = wide_x[:size].copy_(left), wide_weight.copy_(weight), wide_y[:size]
            bias = None if bias is None else bias.to(dtype)
        right = weight.t() if transposed else weight
        torch.mm(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out)
        if not direct:
            y[rows] = out
    return y


def _weight_gradients(dy: torch.Tensor, x: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    shape = (dy.shape[1], x.shape[1])
    # Each in memory of its own: what is as large as all together is given back to the system, and asked for again.
    found = [torch.empty(shape, dtype=x.dtype) if count else torch.zeros(shape, dtype=x.dtype) for count in counts]
    direct, dtype = _multiplies(x.dtype), reference.wide(x.dtype)
    if not direct:
        longest = max(counts)
        wide_dy, wide_x = _buffer(longest, dy, dtype), _buffer(longest, x, dtype)
        wide_out = torch.empty(shape, dtype=dtype)
    for expert, rows in groups.slices(counts):
        left, right, out = dy[rows], x[rows], found[expert]
        if not direct:
            size = rows.stop - rows.start
            left, right, out = wide_dy[:size].copy_(left), wide_x[:size].copy_(right), wide_out
        torch.mm(left.t(), right, out=out)
        if not direct:
            found[expert].copy_(out)
    return found


_PRODUCTS = autograd.Products(_forward, _weight_gradients)


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor's products of that dtype are as good as those of fp32."""
    return dtype in (torch.float32, torch.float64) or (dtype == torch.bfloat16 and cpu_products.has_bf16())


def _buffer(rows: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(rows, like.shape[1], dtype=dtype)
