"""linear_cross_entropy by vocabulary chunks, on a backend's cross_entropy kernels.

Unlike token chunks, each weight gradient chunk is one matmul without an fp32 copy; only hidden's gradient is summed
over chunks. Logits of the first columns, up to KEPT_BYTES, are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops import accumulate_wgrad
from mindspeed_lite.ops.cross_entropy.loss import Shard, losses, merge

# Minimum chunk width: narrower matmuls underuse the device.
_NARROWEST = 512

# Constant, so that memory does not grow with vocabulary or tokens.
KEPT_BYTES = 1 << 26

# Logits per chunk: 8 MiB of bf16.
CHUNK = 1 << 22
# Columns per chunk on CUDA. Relative to its four matmuls, a chunk's accesses to hidden and its fp32 gradient cost 0.61
# for 512 columns and 0.04 for 8192 on an H100 (3.35 TB/s, 600 bf16 TFLOP/s).
COLUMNS = 8192


class Accumulate(NamedTuple):
    """Sink for weight's gradient instead of autograd.

    add(rows, dlogits [T, n], hidden [T, H]): dlogits^T hidden is the gradient of these weight rows; dlogits is valid
    during the call. done(): after the last add; returns autograd's gradient of weight.
    """

    add: Callable[[slice, Tensor, Tensor], None]
    done: Callable[[], Tensor | None]


def linear_cross_entropy(
    kernels: Any, hidden: Tensor, weight: Tensor, target: Tensor, shard: Shard, accumulate: Accumulate | None
) -> Tensor:
    elements = COLUMNS * target.numel() if hidden.is_cuda else CHUNK
    keeps = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    parts = _parts(target.numel(), weight, elements, keeps)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, kernels, parts, shard, accumulate
    )
    return loss


class _Parts(NamedTuple):
    width: int
    kept: int
    step: int

    def computed(self) -> list[slice]:
        return [slice(first, min(first + self.step, self.width)) for first in range(self.kept, self.width, self.step)]


def _parts(count: int, weight: Tensor, elements: int, keeps: bool) -> _Parts:
    width = weight.shape[0]
    fit = KEPT_BYTES // (max(count, 1) * weight.itemsize) if keeps else 0
    kept = width if fit >= width else fit // 64 * 64 if fit >= _NARROWEST else 0
    rest = max(width - kept, 1)
    most = min(rest, max(_NARROWEST, elements // max(count, 1)))
    step = -(-rest // -(-rest // most))  # of equal size
    return _Parts(width, kept, -(-step // 64) * 64)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        kernels: Any,
        parts: _Parts,
        shard: Shard,
        accumulate: Accumulate | None,
    ) -> Tensor:
        rows = hidden.reshape(target.numel(), hidden.shape[-1])  # [T, H]
        flat = target.reshape(-1).to(torch.int64)  # [T]
        kept = torch.mm(rows, weight[: parts.kept].t()) if parts.kept else None
        statistics = merge(
            torch.stack(
                [
                    kernels.statistics(logits, flat, shard.start + part.start)
                    for part, logits in _logits(rows, weight, parts, kept)
                ]
            )
        )  # [3, T]
        if shard.gather is not None:
            statistics = merge(shard.gather(statistics))
        loss = losses(statistics, flat, shard.size)
        ctx.save_for_backward(hidden, weight, flat, statistics[:2], kept)
        ctx.kernels, ctx.parts, ctx.start, ctx.accumulate = kernels, parts, shard.start, accumulate
        return loss.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target, statistics, kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        rows = hidden.reshape(target.numel(), hidden.shape[-1])  # [T, H]
        dloss = dloss.reshape(-1).to(statistics.dtype).contiguous()
        accumulate = ctx.accumulate if wants_weight else None
        parts, kept = ctx.parts, kept if ctx.parts.kept else None
        # Kept logits are overwritten below: a second backward pass recomputes them.
        ctx.parts = parts._replace(kept=0)
        alone = parts.kept == parts.width
        dhidden = None
        if wants_hidden and not alone:
            dhidden = torch.zeros(rows.shape, dtype=statistics.dtype, device=rows.device)
        dweight = torch.empty_like(weight) if wants_weight and accumulate is None else None
        for part, logits in _logits(rows, weight, parts, kept):
            start = ctx.start + part.start
            ctx.kernels.gradient(logits, target, start, statistics, dloss, logits)
            if dhidden is not None:
                _add_product(dhidden, logits, weight[part])
            elif wants_hidden:
                dhidden = torch.mm(logits, weight)
            if dweight is not None:
                torch.mm(logits.t(), rows, out=dweight[part])
            elif accumulate is not None:
                accumulate.add(part, logits, rows)
        if accumulate is not None:
            dweight = accumulate.done()
        if dhidden is not None:
            dhidden = dhidden.to(hidden.dtype).view(hidden.shape)
        return dhidden, dweight, *[None] * 5


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's dtype (not narrower than a and b)."""
    if accumulate_wgrad.sums_in_main_dtype(total, b):
        accumulate_wgrad.accumulate_wgrad(total, a.t(), b)
    else:
        # Adds the 16-bit product and its rounding error, which would accumulate over chunks.
        rounded = torch.mm(a, b)
        total += rounded
        total += torch.addmm(rounded, a, b, beta=-1)


def _logits(rows: Tensor, weight: Tensor, parts: _Parts, kept: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """(vocabulary slice, logits [T, n]); recomputed chunks reuse one buffer."""
    if kept is not None:
        yield slice(0, parts.kept), kept
    computed = parts.computed()
    count = rows.shape[0]
    memory = rows.new_empty(count * parts.step if computed else 0)
    for part in computed:
        width = part.stop - part.start
        logits = memory[: count * width].view(count, width) if count else rows.new_empty(0, width)
        yield part, torch.mm(rows, weight[part].t(), out=logits)
