"""grouped_matmul on CPU: one PyTorch matmul per expert, written in place.

oneDNN compiles a kernel per row count (0.6 ms). Zero padding leaves sixteen counts per power of two.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_lite.ops import traced

Tensors = Sequence[Tensor]

COUNTS_ON_HOST = True
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def grouped_matmul(
    x: Tensor, weights: Tensors, counts: Sequence[int], biases: Tensors | None, transposed: bool
) -> Tensor:
    parts = []
    for rows, weight, bias in zip(
        torch.split(x, list(counts)), weights, biases or itertools.repeat(None), strict=False
    ):
        right, left = weight.t() if transposed else weight, _padded(rows)
        part = left @ right if bias is None else torch.addmm(bias, left, right)
        parts.append(part[: len(rows)])
    return torch.cat(parts)


@traced.observed
def weight_gradients(dy: Tensor, x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    pairs = zip(torch.split(dy, list(counts)), torch.split(x, list(counts)), strict=True)
    return [_padded(a).t() @ _padded(b) for a, b in pairs]


@traced.observed
def accumulate_weight_gradients(main_grads: Tensors, dy: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    for main_grad, a, b in zip(main_grads, torch.split(dy, list(counts)), torch.split(x, list(counts)), strict=True):
        if not len(a):
            continue
        if main_grad.dtype == x.dtype:
            main_grad.addmm_(a.t(), b)
        else:
            main_grad.add_(_padded(a).t() @ _padded(b))


def _padded(rows: Tensor) -> Tensor:
    if rows.dtype != torch.bfloat16 or not len(rows):
        return rows
    step = max(8, 1 << (len(rows) - 1).bit_length() >> 5)
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % step))
