"""grouped_matmul on CPU: one PyTorch matmul per expert, written in place.

oneDNN compiles a kernel per row count (0.6 ms). Zero padding leaves sixteen counts per power of two.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_lite.ops.grouped_matmul import autograd, reference
from mindspeed_lite.ops.traced import is_traced

if TYPE_CHECKING:
    from mindspeed_lite.ops.grouped_matmul import Case

Tensors = Sequence[Tensor]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def supported(case: Case) -> list[str]:
    return [] if case.dtype in _DTYPES else [f"dtype {case.dtype}: there are products of floating-point numbers"]


def grouped_matmul(
    x: Tensor,
    weights: Tensors | Tensor,
    counts: autograd.Counts,
    biases: Tensors | None = None,
    transposed: bool = True,
    take_gradients: autograd.TakeGradients | None = None,
) -> Tensor:
    if is_traced(x):
        return reference.grouped_matmul(x, weights, counts, biases, transposed, take_gradients)
    return autograd.run(_PRODUCTS, x, weights, autograd.on_host(counts, x.shape[0]), biases, transposed, take_gradients)


def weight_gradients(dy: Tensor, x: Tensor, counts: autograd.Counts) -> list[Tensor]:
    sizes = autograd.on_host(counts, x.shape[0])
    return [_padded(a).t() @ _padded(b) for a, b in zip(torch.split(dy, sizes), torch.split(x, sizes), strict=True)]


def accumulate_weight_gradients(main_grads: Tensors, dy: Tensor, x: Tensor, counts: autograd.Counts) -> None:
    sizes = autograd.on_host(counts, x.shape[0])
    for main_grad, a, b in zip(main_grads, torch.split(dy, sizes), torch.split(x, sizes), strict=True):
        if not len(a):
            continue
        if main_grad.dtype == x.dtype:
            main_grad.addmm_(a.t(), b)
        else:
            main_grad.add_(_padded(a).t() @ _padded(b))


def _forward(x: Tensor, weights: Tensors, counts: Sequence[int], biases: Tensors | None, transposed: bool) -> Tensor:
    parts = []
    for rows, weight, bias in zip(
        torch.split(x, list(counts)), weights, biases or itertools.repeat(None), strict=False
    ):
        right, left = weight.t() if transposed else weight, _padded(rows)
        part = left @ right if bias is None else torch.addmm(bias, left, right)
        parts.append(part[: len(rows)])
    return torch.cat(parts)


_PRODUCTS = autograd.Products(_forward, weight_gradients)


def _padded(rows: Tensor) -> Tensor:
    if rows.dtype != torch.bfloat16 or not len(rows):
        return rows
    step = max(8, 1 << (len(rows) - 1).bit_length() >> 5)
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % step))
