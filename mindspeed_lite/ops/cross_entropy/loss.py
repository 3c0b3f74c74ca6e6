"""Merges shard statistics into the loss and its gradient; shared by all cross_entropy backends.

statistics   m = max_v x_v        s = sum_v exp(x_v - m)        p = x_target, 0 outside this shard
merge        M = max_i m_i        S = sum_i s_i exp(m_i - M)    P = sum_i p_i
loss         log S - (P - M)
gradient     dx_v = (exp(x_v - M) / S - [v = target]) dloss

A backend has two passes over contiguous rows [T, V] of a shard; int64 target [T], possibly outside of it:

    statistics(rows, target, start) -> [3, T] (m, s, p)
    gradient(rows, target, start, statistics [2, T] (M, S), dloss [T], out [T, V]); `out` may be `rows`

A row of -inf has the sum 0.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Gather = Callable[[Tensor], Tensor]


def merge(parts: Tensor) -> Tensor:
    """[shards, 3, T] -> [3, T]; with a fourth row u = sum_v exp(x_v - m) (x_v - m) -> [4, T]."""
    if parts.shape[0] == 1:
        return parts[0]
    top = parts[:, 0].amax(0)  # [T]
    merged: Tensor = parts.sum(0)
    merged[0] = top
    # Parts may be all -inf.
    lower = shifted(parts[:, 0], torch.where(top == float("-inf"), 0.0, top))
    torch.sum(parts[:, 1] * lower.exp(), dim=0, out=merged[1])
    if parts.shape[1] == 4:
        torch.sum(lower.exp() * (parts[:, 3] + parts[:, 1] * lower), dim=0, out=merged[3])
    return merged


def shifted(x: Tensor, top: Tensor) -> Tensor:
    """x - top, at least -1000: its exponential is 0, and its product with 0 is not NaN."""
    return (x - top).clamp_(min=-1000.0)


def losses(merged: Tensor, target: Tensor, vocab_size: int) -> Tensor:
    top, sums, predicted = merged
    known = (target >= 0) & (target < vocab_size)
    loss: Tensor = sums.log() - torch.where(known, predicted - top, 0.0)
    return loss


class Shard(NamedTuple):
    """This rank's part of a vocabulary.

    start: its first token. size: of the whole vocabulary. gather: local statistics [3, T] -> all shards', [shards, 3,
    T]; None if the part is the whole.
    """

    start: int
    size: int
    gather: Gather | None


def shard(operator: str, target: Tensor, start: int, width: int, size: int | None, gather: Gather | None) -> Shard:
    """Checked shard [start, start + width)."""
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"{operator}: target is {target.dtype}, and it counts tokens")
    whole = start + width if size is None else size
    if width == 0 or start < 0 or start + width > whole or (gather is None and width != whole):
        raise ValueError(
            f"{operator}: the slice of {width} from {start} of a vocabulary of {whole} is not one, or it is not the "
            f"whole and nothing gathers the others"
        )
    return Shard(start, whole, gather)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, kernels: Any, shard: Shard) -> Tensor:
        ctx.shape = logits.shape
        if not logits.is_contiguous():
            logits = logits.contiguous()
        rows = logits.view(-1, logits.shape[-1])  # [T, V]
        flat = target.reshape(-1).to(torch.int64)  # [T]
        statistics = kernels.statistics(rows, flat, shard.start)  # [3, T]
        if shard.gather is not None:
            statistics = merge(shard.gather(statistics))
        loss = losses(statistics, flat, shard.size)
        ctx.save_for_backward(logits, flat, statistics[:2])
        ctx.kernels, ctx.start = kernels, shard.start
        return loss.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, statistics = ctx.saved_tensors
        ours = is_unshared(references(logits))
        out = logits.detach() if ours else torch.empty_like(logits)
        rows, gradient = (t.view(-1, t.shape[-1]) for t in (logits, out))
        dloss = dloss.reshape(-1).to(statistics.dtype).contiguous()
        ctx.kernels.gradient(rows, target, ctx.start, statistics, dloss, gradient)
        if ours:
            # Autograd does not see writes through a pointer.
            torch.autograd.graph.increment_version(logits)
        return out.view(ctx.shape), None, None, None


def is_unshared(references: tuple[int, ...]) -> bool:
    """True if a tensor of ctx.saved_tensors has no other reference."""
    return bool(references) and references == unshared_references()


def references(tensor: Tensor) -> tuple[int, ...]:
    """Reference counts of a tensor and of its storage; empty if unknown."""
    if torch.compiler.is_compiling() or not hasattr(torch._C, "_storage_Use_Count"):
        return ()
    memory = tensor.untyped_storage()
    below = torch._C._storage_Use_Count(memory._cdata)
    own: int = tensor._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(tensor), own, sys.getrefcount(memory), below


@functools.cache
def unshared_references() -> tuple[int, ...]:
    """`references` of a tensor that only a graph holds, on this PyTorch and Python.

    A separate thread avoids the caller's saved-tensor hooks and dispatch modes, which change the counts.
    """
    _Probe.found = ()
    probe = threading.Thread(target=_Probe.run)
    probe.start()
    probe.join()
    return _Probe.found


class _Probe(torch.autograd.Function):
    found: tuple[int, ...] = ()

    @classmethod
    def run(cls) -> None:
        cls.apply(torch.ones(2, requires_grad=True) * 2).backward()  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, torch.ones(1))
        return x.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        _Probe.found = references(x)
        return dloss.expand(2)
