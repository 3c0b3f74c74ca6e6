"""Autograd of grouped_matmul, one node for all experts; and what backends share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.autograd import Inputs, Kernel, KernelFunction, apply

Tensors = Sequence[Tensor]
# Rows per expert: int64 tensor [E] or host integers.
Counts = Tensor | Sequence[int]
# (dy [T, N], x [T, K], counts) -> a gradient per weight, or None if stored elsewhere.
TakeGradients = Callable[[Tensor, Tensor, Counts], Sequence[Tensor | None]]


def on_host(counts: Counts, rows: int) -> list[int]:
    """Counts as integers; may synchronise."""
    if not isinstance(counts, Tensor):
        return list(counts)
    found: list[int] = counts.tolist() if rows else [0] * len(counts)
    return found


def on_device(counts: Counts, device: torch.device) -> Tensor:
    """Counts as int64 on `device`, without synchronisation on CUDA."""
    if isinstance(counts, Tensor):
        return counts.to(device)
    cuda = device.type == "cuda"
    return torch.tensor(counts, dtype=torch.int64, pin_memory=cuda).to(device, non_blocking=cuda)


class _Options(NamedTuple):
    backend: Any
    counts: Counts
    transposed: bool
    take_gradients: TakeGradients | None
    number: int  # of weights


class _GroupedMatmul(KernelFunction):
    """Autograd node of a grouped matmul; `bench` finds the experts' matmuls by its name."""


def run(
    backend: Any, x: Tensor, weights: Tensors, counts: Counts, biases: Tensors | None, transposed: bool,
    take_gradients: TakeGradients | None,
) -> Tensor:  # fmt: skip
    options = _Options(backend, counts, transposed, take_gradients, len(weights))
    y: Tensor = apply(_GROUPED, (x, *weights, *(biases or ())), options, _GroupedMatmul)
    return y


def _forward(inputs: Any, options: _Options) -> tuple[Tensor, Inputs]:
    x, weights, biases = inputs[0], inputs[1 : 1 + options.number], inputs[1 + options.number :]
    counts = options.counts
    saved = (x, *weights, *((counts,) if isinstance(counts, Tensor) else ()))
    return options.backend.grouped_matmul(x, weights, counts, biases or None, options.transposed), saved


def _backward(dy: Tensor, saved: Any, options: _Options, wanted: Sequence[bool]) -> Inputs:
    x, weights = saved[0], saved[1 : 1 + options.number]
    counts = saved[-1] if isinstance(options.counts, Tensor) else options.counts
    backend, transposed, number = options.backend, options.transposed, options.number
    dx: Tensor | None = None
    dweights: Sequence[Tensor | None] = [None] * number
    dbiases: Sequence[Tensor | None] = [None] * (len(wanted) - 1 - number)
    if wanted[0]:
        dx = backend.grouped_matmul(dy, weights, counts, None, not transposed)
    if any(wanted[1 : 1 + number]):
        if options.take_gradients is not None:
            dweights = options.take_gradients(dy, x, counts)
        else:
            dweights = backend.weight_gradients(*((dy, x) if transposed else (x, dy)), counts)
    if any(wanted[1 + number :]):
        # Bias gradient: weight gradient for an input of ones.
        found = backend.weight_gradients(dy, dy.new_ones(dy.shape[0], 1), counts)
        dbiases = [each.squeeze(-1) for each in found]
    return (dx, *dweights, *dbiases)


_GROUPED = Kernel(_forward, _backward)
