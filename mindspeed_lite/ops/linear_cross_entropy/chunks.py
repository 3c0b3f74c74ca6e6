"""Loss and entropy by vocabulary chunks, on a backend's cross_entropy kernels.

Unlike token chunks, each weight gradient chunk is one matmul without an fp32 copy; only hidden's gradient is summed
over chunks. Logits up to KEPT_BYTES are kept; of up to four times as many, those of the first columns.

entropy      H = log S - U / S,  U = sum_v exp(x_v - M) (x_v - M)
gradient     dx_v = p_v (dloss - dentropy (log p_v + H)) - [v = target] dloss,  p_v = exp(x_v - M) / S
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops import accumulate_wgrad, batch_invariant
from mindspeed_lite.ops.cross_entropy.loss import Shard, losses, merge
from mindspeed_lite.ops.linear_cross_entropy import entropies

# Minimum chunk width: narrower matmuls underuse the device.
_NARROWEST = 512

# Constant, so that memory does not grow with vocabulary or tokens. A smaller part than a fourth is not worth its bytes.
KEPT_BYTES = 1 << 28

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


class Head(NamedTuple):
    """Logits = soft_cap tanh(x / soft_cap) / temperature for x = hidden @ weight^T.

    entropy: whether the entropy of the distribution is returned, too.
    """

    temperature: float = 1.0
    soft_cap: float | None = None
    entropy: bool = False

    def apply(self, x: Tensor) -> None:
        if self.soft_cap is not None:
            x.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if self.temperature != 1.0:
            x.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float | None:
        """Derivative of the logits with respect to the matmul's output x, from the logits; None if it is 1."""
        if self.soft_cap is None:
            return None if self.temperature == 1.0 else 1 / self.temperature
        bent = logits * (self.temperature / self.soft_cap)  # tanh(x / soft_cap)
        return bent.square_().neg_().add_(1).div_(self.temperature)


def loss_and_entropy(
    kernels: Any,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    shard: Shard,
    accumulate: Accumulate | None,
    head: Head,
) -> tuple[Tensor, Tensor | None]:
    keeps = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    parts = _parts(target.numel(), weight, keeps)
    with batch_invariant.scope():
        found: tuple[Tensor, Tensor | None] = _Chunks.apply(  # type: ignore[no-untyped-call]
            hidden, weight, target, kernels, parts, shard, accumulate, head
        )
    return found


class _Parts(NamedTuple):
    width: int
    kept: int
    step: int

    def computed(self) -> list[slice]:
        return [slice(first, min(first + self.step, self.width)) for first in range(self.kept, self.width, self.step)]


def _parts(count: int, weight: Tensor, keeps: bool) -> _Parts:
    width = weight.shape[0]
    if batch_invariant.is_required():  # bits depend on the width of chunks
        return _Parts(width, 0, _NARROWEST)
    elements = COLUMNS * count if weight.is_cuda else CHUNK
    fit = KEPT_BYTES // (max(count, 1) * weight.itemsize) if keeps else 0
    kept = width if fit >= width else fit // 64 * 64 if 4 * fit >= width else 0
    rest = max(width - kept, 1)
    most = min(rest, max(_NARROWEST, elements // max(count, 1)))
    step = -(-rest // -(-rest // most))  # of equal size
    return _Parts(width, kept, -(-step // 64) * 64)


class _Chunks(torch.autograd.Function):
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
        head: Head,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        rows = hidden.reshape(target.numel(), hidden.shape[-1])  # [T, H]
        flat = target.reshape(-1).to(torch.int64)  # [T]
        kept = torch.mm(rows, weight[: parts.kept].t()) if parts.kept else None
        if kept is not None:
            head.apply(kept)
        statistics: Tensor | None = None  # [3, T], with entropy [4, T]
        for part, logits in _logits(rows, weight, parts, kept, head):
            start = shard.start + part.start
            if head.entropy:
                found = entropies.statistics(kernels, logits, flat, start)
            else:
                found = kernels.statistics(logits, flat, start)
            # Merged at once: 128k tokens of 293 chunks would take 450 MiB.
            statistics = found if statistics is None else merge(torch.stack([statistics, found]))
        assert statistics is not None
        if shard.gather is not None:
            statistics = merge(shard.gather(statistics))
        loss = losses(statistics[:3], flat, shard.size).view(target.shape)
        entropy = entropies.entropies(statistics) if head.entropy else None
        ctx.save_for_backward(hidden, weight, flat, statistics[:2], kept, entropy)
        ctx.kernels, ctx.parts, ctx.start, ctx.accumulate, ctx.head = kernels, parts, shard.start, accumulate, head
        return loss, None if entropy is None else entropy.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor | None, dentropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dloss is None and dentropy is None:
            return (None,) * 8
        hidden, weight, target, statistics, kept, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        rows = hidden.reshape(target.numel(), hidden.shape[-1])  # [T, H]
        dloss = statistics.new_zeros(target.numel()) if dloss is None else _as_row(dloss, statistics)
        dentropy = None if dentropy is None else _as_row(dentropy, statistics)
        head = ctx.head
        accumulate = ctx.accumulate if wants_weight else None
        # Kept logits are overwritten, unseen by autograd: a second backward pass recomputes them.
        parts, kept = ctx.parts, kept.data if ctx.parts.kept else None
        ctx.parts = _parts(target.numel(), weight, keeps=False)
        alone = parts.kept == parts.width
        dhidden = None
        if wants_hidden and not alone:
            dhidden = torch.zeros(rows.shape, dtype=statistics.dtype, device=rows.device)
        dweight = torch.empty_like(weight) if wants_weight and accumulate is None else None
        for part, logits in _logits(rows, weight, parts, kept, head):
            start = ctx.start + part.start
            slope = head.slope(logits)
            if dentropy is None:
                ctx.kernels.gradient(logits, target, start, statistics, dloss, logits)
            else:
                entropies.gradient(ctx.kernels, logits, target, start, statistics, dloss, entropy, dentropy)
            if slope is not None:
                logits.mul_(slope)
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
        return dhidden, dweight, *[None] * 6


def _as_row(gradient: Tensor, statistics: Tensor) -> Tensor:
    return gradient.reshape(-1).to(statistics.dtype).contiguous()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's dtype (not narrower than a and b)."""
    if accumulate_wgrad.sums_in_main_dtype(total, b):
        accumulate_wgrad.accumulate_wgrad(total, a.t(), b)
    else:
        # Adds the 16-bit product and its rounding error, which would accumulate over chunks.
        rounded = torch.mm(a, b)
        total += rounded
        total += torch.addmm(rounded, a, b, beta=-1)


def _logits(
    rows: Tensor, weight: Tensor, parts: _Parts, kept: Tensor | None, head: Head
) -> Iterator[tuple[slice, Tensor]]:
    """(vocabulary slice, logits [T, n]); recomputed chunks reuse one buffer."""
    if kept is not None:
        yield slice(0, parts.kept), kept
    computed = parts.computed()
    count = rows.shape[0]
    memory = rows.new_empty(count * parts.step if computed else 0)
    for part in computed:
        width = part.stop - part.start
        logits = memory[: count * width].view(count, width) if count else rows.new_empty(0, width)
        torch.mm(rows, weight[part].t(), out=logits)
        head.apply(logits)
        yield part, logits
