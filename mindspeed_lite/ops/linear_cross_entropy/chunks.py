"""linear_cross_entropy chunk by chunk of the vocabulary, on whatever kernels look at a chunk of logits.

Chunks of the vocabulary and not of the tokens: the product that gives a chunk of weight's gradient then runs over all
tokens, is complete, and needs no fp32 copy of weight's size to be summed in. What is summed over chunks is the
gradient of hidden, which is small beside the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops.cross_entropy.loss import Gather, Kernels, Weights, losses, merge

# Fewest entries of the vocabulary in a chunk: a product over fewer columns does not fill a machine.
_NARROWEST = 512


class Accumulate(NamedTuple):
    """Where weight's gradient goes instead of to autograd.

    add(rows, dlogits [T, n], hidden [T, H]): dlogits^T hidden is the gradient of these rows of weight; dlogits is
    valid during the call. done(): all of them have been added; returns what autograd gets as the gradient.
    """

    add: Callable[[slice, torch.Tensor, torch.Tensor], None]
    done: Callable[[], torch.Tensor | None]


def linear_cross_entropy(
    kernels: Kernels,
    elements: int,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    vocab_start: int,
    vocab_size: int,
    label_smoothing: float,
    gather: Gather | None,
    accumulate: Accumulate | None,
) -> torch.Tensor:
    """The operator on these kernels, with chunks of about so many elements."""
    weights = Weights.of(label_smoothing, vocab_size)
    loss: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, kernels, elements, vocab_start, vocab_size, weights, gather, accumulate
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        kernels: Kernels,
        elements: int,
        vocab_start: int,
        vocab_size: int,
        weights: Weights,
        gather: Gather | None,
        accumulate: Accumulate | None,
    ) -> torch.Tensor:
        rows = hidden.reshape(target.numel(), hidden.shape[-1])  # [T, H]
        flat = target.reshape(-1).to(torch.int64)  # [T]
        parts = [
            kernels.statistics(logits, flat, vocab_start + part.start, weights.smoothing != 0.0, False)
            for part, logits in _logits(rows, weight, elements)
        ]
        statistics = merge(torch.stack(parts))  # [R, T]
        if gather is not None:
            statistics = merge(gather(statistics))
        loss = losses(statistics, flat, vocab_size, weights)
        ctx.save_for_backward(hidden, weight, flat, statistics[:2])
        ctx.kernels, ctx.elements, ctx.vocab_start = kernels, elements, vocab_start
        ctx.weights, ctx.accumulate = weights, accumulate
        return loss.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, target, (top, sums) = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        rows = hidden.reshape(target.numel(), hidden.shape[-1])  # [T, H]
        dloss = dloss.reshape(-1).to(top.dtype).contiguous()
        on, off, _ = ctx.weights
        accumulate = ctx.accumulate if wants_weight else None
        dhidden = torch.zeros(rows.shape, dtype=top.dtype, device=rows.device) if wants_hidden else None
        dweight = torch.empty_like(weight) if wants_weight and accumulate is None else None
        for part, logits in _logits(rows, weight, ctx.elements):
            start = ctx.vocab_start + part.start
            ctx.kernels.gradient(logits, target, start, top, sums, dloss, on, off, logits)
            if dhidden is not None:
                _add_product(dhidden, logits, weight[part])
            if dweight is not None:
                torch.mm(logits.t(), rows, out=dweight[part])
            elif accumulate is not None:
                accumulate.add(part, logits, rows)
        if accumulate is not None:
            dweight = accumulate.done()
        if dhidden is not None:
            dhidden = dhidden.to(hidden.dtype).view(hidden.shape)
        return dhidden, dweight, None, None, None, None, None, None, None, None


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b in total's dtype, which is wider than that of a and b or the same."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        # A product in 16 bits is rounded to them, and one rounding per chunk would add up. What it lost is the same
        # product minus the rounded one, which is a single product too: the sum inside is in fp32.
        rounded = torch.mm(a, b)
        total += rounded
        total += torch.addmm(rounded, a, b, beta=-1)


def _logits(rows: torch.Tensor, weight: torch.Tensor, elements: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """(part of the vocabulary, its logits [T, n]) for every part; all of them in the same memory, one at a time."""
    count, width = rows.shape[0], weight.shape[0]
    most = min(width, max(_NARROWEST, elements // max(count, 1)))
    parts = -(-width // most)
    step = -(-width // parts)  # of equal size, and a multiple of what vectors and tiles like
    step = min(width, -(-step // 64) * 64)
    memory = rows.new_empty(count * step)
    for first in range(0, width, step):
        part = slice(first, min(first + step, width))
        logits = (
            memory[: count * (part.stop - first)].view(count, -1) if count else rows.new_empty(0, part.stop - first)
        )
        yield part, torch.mm(rows, weight[part].t(), out=logits)
