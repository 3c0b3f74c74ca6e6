"""Tensor-parallel linear layers that overlap communication with their own GEMMs.

    column parallel: y = X w^T. With sequence parallelism X is gathered and its gradient reduce-scattered; without, X is
        replicated and its gradient all-reduced.
    row parallel: y = sum over ranks of x w^T. With sequence parallelism y is scattered and its gradient gathered;
        without, the backward pass does not communicate.

Weight gradients overlap with the input gradient's message. Only x and the weight are saved; backward gathers again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import overlapped_gemm

# (phase, x [M, K], w [K, N], run) -> chunk count; `run(n)` is the pass to time.
ChunkPolicy = Callable[[str, Tensor, Tensor, Callable[[int], object]], int]


@dataclass(frozen=True)
class Wgrad:
    """The weight gradient dy^T x, by default autograd's.

    compute: from dy [M, N] and x [M, K]; returns the gradient for autograd.
    defer: queues dy in the layer's shape; False if it does not.
    placeholder: returned to autograd for a deferred gradient.
    """

    compute: Callable[[Tensor, Tensor], Tensor | None] = lambda dy, x: dy.t() @ x
    defer: Callable[[Tensor], bool] = lambda dy: False
    placeholder: Callable[[], Tensor | None] = lambda: None


AUTOGRAD_WGRAD = Wgrad()


@dataclass(frozen=True)
class TPCommConfig:
    """Communication settings of a layer. gemm: has `gather_matmul` and `matmul_scatter`."""

    group: ProcessGroup
    sequence_parallel: bool
    chunks: ChunkPolicy
    wgrad: Wgrad = AUTOGRAD_WGRAD
    gemm: Any = overlapped_gemm


def fixed_chunks(number: int) -> ChunkPolicy:
    return lambda phase, x, w, run: number


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, comm: TPCommConfig) -> Tensor:
    """x [s, ..., K] (with sequence parallelism [s / p, ..., K]), weight [N, K], bias [N] -> [s, ..., N]."""
    return _Column.apply(x, weight, bias, comm)  # type: ignore[no-any-return,no-untyped-call]


def row_linear(x: Tensor, weight: Tensor, comm: TPCommConfig) -> Tensor:
    """x [s, ..., K], weight [N, K] -> [s, ..., N], with sequence parallelism [s / p, ..., N]; no bias."""
    return _Row.apply(x, weight, comm)  # type: ignore[no-any-return,no-untyped-call]


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, comm: TPCommConfig) -> Any:
        ctx.comm, ctx.shape = comm, x.shape
        # As in Megatron, a frozen weight freezes the bias too.
        ctx.trains_bias = bias is not None and weight.requires_grad
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        rows, w = _rows(x), weight.t()
        if comm.sequence_parallel:

            def run(chunks: int) -> Any:
                return comm.gemm.gather_matmul(rows, w, comm.group, chunks)[0]

            y = run(comm.chunks("column forward", rows, w, run))
        else:
            y = rows @ w
        if bias is not None:
            y = y + bias
        return _shaped(y, (-1, *x.shape[1:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        comm: TPCommConfig = ctx.comm
        rows = _rows(dy)
        product = comm.gemm.matmul_scatter if comm.sequence_parallel else overlapped_gemm.matmul_reduce
        is_deferred = ctx.needs_input_grad[1] and comm.wgrad.defer(dy)
        needs_weight = ctx.needs_input_grad[1] and not is_deferred
        gathers = needs_weight and comm.sequence_parallel

        def run(chunks: int, wgrad: Wgrad = AUTOGRAD_WGRAD) -> tuple[Any, Any]:
            coming = overlapped_gemm.gather(_rows(x), comm.group) if gathers else None
            dx = product(rows, weight, comm.group, chunks)
            dw = None
            if needs_weight:
                dw = wgrad.compute(rows, _rows(x) if coming is None else coming.wait())
            return dx.wait(), dw

        phase = "column backward" if needs_weight else "column backward without weight"
        # With the gather first, chunks are sent no earlier, and with one hardware queue they hold up products.
        chunks = 1 if gathers else comm.chunks(phase, rows, weight, run)
        dx, dw = run(chunks, comm.wgrad)
        if is_deferred:
            dw = comm.wgrad.placeholder()
        return _shaped(dx, ctx.shape), dw, rows.sum(dim=0) if ctx.trains_bias else None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, comm: TPCommConfig) -> Any:
        ctx.comm, ctx.shape = comm, x.shape
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        rows, w = _rows(x), weight.t()
        product = comm.gemm.matmul_scatter if comm.sequence_parallel else overlapped_gemm.matmul_reduce

        def run(chunks: int) -> Tensor:
            return product(rows, w, comm.group, chunks).wait()

        y = run(comm.chunks("row forward", rows, w, run))
        return _shaped(y, (-1, *x.shape[1:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        comm: TPCommConfig = ctx.comm
        rows: Tensor = _rows(dy)
        total: Tensor | None = rows
        if comm.sequence_parallel:

            def run(chunks: int) -> Any:
                return comm.gemm.gather_matmul(rows, weight, comm.group, chunks, keep=ctx.needs_input_grad[1])

            dx, total = run(comm.chunks("row backward", rows, weight, run))
        else:
            dx = rows @ weight
        dw = None
        if ctx.needs_input_grad[1]:
            assert total is not None
            is_deferred = comm.wgrad.defer(total.view(-1, *dy.shape[1:]))
            dw = comm.wgrad.placeholder() if is_deferred else comm.wgrad.compute(total, _rows(x))
        return _shaped(dx, ctx.shape), dw, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _shaped(rows: Tensor, shape: Any) -> Tensor:
    """Reshape without a view, whose storage Megatron could not release."""
    return torch.ops.aten._unsafe_view(rows, shape)  # type: ignore[no-any-return]
