"""Reference of grouped_matmul."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_lite.ops.rows import precision

Tensors = Sequence[Tensor]


COUNTS_ON_HOST = True


def grouped_matmul(
    x: Tensor, weights: Tensors, counts: Sequence[int], biases: Tensors | None, transposed: bool
) -> Tensor:
    """Differentiable matmul per expert in fp32 (float64 for float64), rounded once."""
    dtype = precision(x.dtype)
    parts = []
    for expert, rows in enumerate(torch.split(x, list(counts))):
        weight = weights[expert].to(dtype)
        y = rows.to(dtype) @ (weight.t() if transposed else weight)  # [T_e, N]
        parts.append(y if biases is None else y + biases[expert].to(dtype))
    return torch.cat(parts).to(x.dtype)


def weight_gradients(dy: Tensor, x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    dtype = precision(x.dtype)
    pairs = zip(torch.split(dy, list(counts)), torch.split(x, list(counts)), strict=True)
    return [(a.to(dtype).t() @ b.to(dtype)).to(x.dtype) for a, b in pairs]


def accumulate_weight_gradients(main_grads: Tensors, dy: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    """main_grad_e += dy_e^T x_e, rounded to x's dtype first, as in autograd."""
    for main_grad, dw in zip(main_grads, weight_gradients(dy, x, counts), strict=True):
        main_grad.add_(dw)
