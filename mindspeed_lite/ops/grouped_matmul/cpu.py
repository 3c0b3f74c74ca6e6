"""grouped_matmul on CPU: a product per expert straight into its place, without a node of autograd for each.

Numbers of 16 bits that the processor does not multiply as such are widened for one expert at a time, into buffers
that are used for all and stay in the cache, multiplied in fp32 and rounded once.

Where the processor multiplies them, bf16 goes through a kernel of its own for all experts at once (cpu.cpp). Without a
compiler, products of one expert each take some rows more, those of the experts that follow, who write theirs later:
oneDNN makes a kernel for every number of rows that it has not met, which takes as long as the product of a few hundred
rows, and a router's choices have other numbers at every step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mindspeed_lite.ops import native
from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad
from mindspeed_lite.ops.accumulate_wgrad import cpu as wgrad
from mindspeed_lite.ops.grouped_matmul import autograd, groups, reference
from mindspeed_lite.ops.traced import is_traced
from mindspeed_lite.platform import cpu_matmul

if TYPE_CHECKING:
    from mindspeed_lite.ops.grouped_matmul import Case

Tensors = Sequence[torch.Tensor]

_log = logging.getLogger("mindspeed_lite")
_lib = native.Library(
    Path(__file__).with_name("cpu.cpp"),
    {"grouped_matmul_bf16": "plplppilllpi", "probe": "ip"},
    uses_torch=True,
    returns_status=True,
)
# Inner sizes are multiples of this many, as in brgemm.h.
_TILE = 32
# Multiplications that cost as much as an element of a pass over memory, by which `native.threads` counts.
_DENSITY = 64

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def supported(case: Case) -> list[str]:
    return [] if case.dtype in _DTYPES else [f"dtype {case.dtype}: there are products of floating-point numbers"]


def grouped_matmul(
    x: torch.Tensor,
    weights: Tensors | torch.Tensor,
    counts: groups.Counts,
    biases: Tensors | None = None,
    transposed: bool = True,
    take_gradients: autograd.TakeGradients | None = None,
) -> torch.Tensor:
    if is_traced(x):
        return reference.grouped_matmul(x, weights, counts, biases, transposed, take_gradients)
    return autograd.run(_PRODUCTS, x, weights, groups.on_host(counts, x.shape[0]), biases, transposed, take_gradients)


def weight_gradients(dy: torch.Tensor, x: torch.Tensor, counts: groups.Counts) -> Sequence[torch.Tensor]:
    if is_traced(x):
        return reference.weight_gradients(dy, x, counts)
    return _weight_gradients(dy, x, groups.on_host(counts, x.shape[0]))


def accumulate_weight_gradients(main_grads: Tensors, dy: torch.Tensor, x: torch.Tensor, counts: groups.Counts) -> None:
    if is_traced(x):
        reference.accumulate_weight_gradients(main_grads, dy, x, counts)
        return
    sizes = groups.on_host(counts, x.shape[0])
    dtype = reference.wide(x.dtype)
    direct, rounded = _multiplies(x.dtype), main_grads[0].dtype != dtype
    if (
        direct
        and (main_grads[0].dtype, x.dtype) == (torch.float32, torch.bfloat16)
        # One that has most of the rows is better shared by all threads.
        and max(sizes) * torch.get_num_threads() <= x.shape[0]
        and wgrad.kernel_unusable() is None
        and all(each.is_contiguous() for each in main_grads)
    ):
        wgrad.accumulate_wgrads(main_grads, dy, x, sizes)
        return
    wide_dy, wide_x = _buffer(sizes, dy, dtype), _buffer(sizes, x, dtype)
    for main_grad, left, right in zip(main_grads, _groups(dy, sizes), _groups(x, sizes), strict=True):
        size = len(left)
        if direct and size:
            accumulate_wgrad(main_grad, left, right)
        elif size:
            factors = wide_dy[:size].copy_(left).t(), wide_x[:size].copy_(right)
            main_grad.add_(torch.mm(*factors)) if rounded else main_grad.addmm_(*factors)


def _forward(
    x: torch.Tensor, weights: Tensors, counts: Sequence[int], biases: Tensors | None, transposed: bool
) -> torch.Tensor:
    y = torch.empty(x.shape[0], weights[0].shape[0 if transposed else 1], dtype=x.dtype)
    if x.dtype == torch.bfloat16 and _multiplies(x.dtype) and x.shape[1] % _TILE == 0 and _unusable() is None:
        _all_at_once(x, weights, counts, biases, transposed, y)
        return y
    direct, dtype = _multiplies(x.dtype), reference.wide(x.dtype)
    wide_x, wide_y = _buffer(counts, x, dtype), _buffer(counts, y, dtype)
    wide_weight = torch.empty(weights[0].shape, dtype=dtype)
    end = 0
    for expert, size in enumerate(counts):
        start, end = end, end + size
        if not size:
            continue
        left, rows = x[start:end], y[start:end]
        weight, bias, out = weights[expert], None if biases is None else biases[expert], rows
        if not direct:
            left, weight, out = wide_x[:size].copy_(left), wide_weight.copy_(weight), wide_y[:size]
            bias = None if bias is None else bias.to(dtype)
        elif x.dtype == torch.bfloat16 and (rounded := _rounded(size)) > size:
            if start + rounded <= len(x):
                left, out = x[start : start + rounded], y[start : start + rounded]
            else:
                left = torch.cat([left, x.new_zeros(rounded - size, x.shape[1])])
                out = y.new_empty(rounded, y.shape[1])
        right = weight.t() if transposed else weight
        torch.mm(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out)
        if out.data_ptr() != rows.data_ptr():
            rows.copy_(out[:size])
    return y


def _all_at_once(
    x: torch.Tensor,
    weights: Tensors,
    counts: Sequence[int],
    biases: Tensors | None,
    transposed: bool,
    y: torch.Tensor,
) -> None:
    x = wgrad.in_rows(x)
    # Copies, if any, live until the kernel has run.
    weights = [each.contiguous() for each in weights]
    biases = biases and [each.contiguous() for each in biases]
    (total, k), n = x.shape, y.shape[1]
    _lib.grouped_matmul_bf16(
        x,
        x.stride(0),
        native.numbers(counts),
        len(weights),
        weights,
        biases,
        transposed,
        total,
        n,
        k,
        y,
        native.threads(total * n * k // _DENSITY),
    )


def _unusable() -> str | None:
    """Why the compiled kernel serves nothing now; logged once, though products one by one are no other operator."""
    reason = native.without_micro_kernel(_lib)
    if reason is not None:
        _log_once(reason)
    return reason


@functools.cache
def _log_once(reason: str) -> None:
    _log.warning("grouped_matmul: one product per expert, because %s", reason)


def _weight_gradients(dy: torch.Tensor, x: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    shape = (dy.shape[1], x.shape[1])
    direct, dtype = _multiplies(x.dtype), reference.wide(x.dtype)
    wide_dy, wide_x = _buffer(counts, dy, dtype), _buffer(counts, x, dtype)
    wide_dw = torch.empty(shape, dtype=dtype)
    # Each in memory of its own: what is as large as all together is given back to the system, and asked for again.
    found = []
    for left, right in zip(_groups(dy, counts), _groups(x, counts), strict=True):
        size = len(left)
        if not size:
            found.append(torch.zeros(shape, dtype=x.dtype))
        elif direct:
            found.append(torch.mm(left.t(), right))
        else:
            factors = wide_dy[:size].copy_(left).t(), wide_x[:size].copy_(right)
            found.append(torch.mm(*factors, out=wide_dw).to(x.dtype))
    return found


_PRODUCTS = autograd.Products(_forward, _weight_gradients)


def _rounded(rows: int) -> int:
    """At least as many; sixteen different ones between a power of two and the next, at least 8 apart."""
    step = max(8, 1 << (rows - 1).bit_length() >> 5)
    return -(-rows // step) * step


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor's products of that dtype are as good as those of fp32."""
    return dtype in (torch.float32, torch.float64) or (dtype == torch.bfloat16 and cpu_matmul.has_bf16())


def _groups(rows: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
    return torch.split_with_sizes(rows, list(counts))


def _buffer(counts: Sequence[int], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """For the longest group; memory that is not written to costs nothing."""
    return torch.empty(max(counts), like.shape[1], dtype=dtype)
