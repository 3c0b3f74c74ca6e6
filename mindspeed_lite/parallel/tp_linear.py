"""Linear layers of a tensor-parallel group whose communication hides behind their own products.

    column parallel: y = X w^T, w having this rank's outputs. With sequence parallelism X is gathered before the product
        and its gradient reduced and scattered after; without, X is on every rank and its gradient is summed.
    row parallel: y = sum over ranks of x w^T, w having this rank's inputs. With sequence parallelism y is scattered
        and its gradient gathered; without, y is on every rank and nothing travels in the backward pass.

In the backward pass the gradient of the weight, for which nothing waits, is computed while that of the input is in
flight. Nothing but x and the weight is saved: what was gathered is gathered again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from . import pipelined
from .pipelined import Pending


class Slices(Protocol):
    """Who says in how many messages a pass of a layer travels."""

    def __call__(self, phase: str, x: torch.Tensor, w: torch.Tensor, run: Callable[[int], object]) -> int:
        """For x [M, K] times w [K, N]; `run(n)` is the pass with n slices, without effect, for whoever measures it."""
        ...


class WeightGradient(Protocol):
    """What happens to the gradient dy^T x of the weight."""

    def later(self, dy: torch.Tensor) -> bool:
        """Whether somebody else computes it; he has been given dy then, in the layer's own shape."""
        ...

    def __call__(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """From dy [M, N] and x [M, K]; what autograd is to be given as the weight's gradient."""
        ...


class Plain:
    """Autograd's own way."""

    def later(self, dy: torch.Tensor) -> bool:
        return False

    def __call__(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        return dy.t() @ x


PLAIN = Plain()


class Products(Protocol):
    """Who multiplies what is gathered or is to be reduced: as the functions of `pipelined`, which says more."""

    def gather_matmul(
        self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, slices: int, keep: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def matmul_scatter(self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, slices: int) -> Pending: ...


@dataclass(frozen=True)
class Link:
    """How one call of a layer talks: over which group, whether its rows are split there, in how many slices."""

    group: dist.ProcessGroup
    sequence_parallel: bool
    slices: Slices
    weight_gradient: WeightGradient
    products: Products = pipelined


def fixed(number: int) -> Slices:
    """Always `number` slices."""
    return lambda phase, x, w, run: number


def column_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, link: Link) -> torch.Tensor:
    """x [s, ..., K] (with sequence parallelism [s / p, ..., K]), weight [N, K], bias [N] -> [s, ..., N]."""
    return _Column.apply(x, weight, bias, link)  # type: ignore[no-any-return,no-untyped-call]


def row_linear(x: torch.Tensor, weight: torch.Tensor, link: Link) -> torch.Tensor:
    """x [s, ..., K], weight [N, K] -> [s, ..., N], with sequence parallelism [s / p, ..., N]; no bias."""
    return _Row.apply(x, weight, link)  # type: ignore[no-any-return,no-untyped-call]


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, link: Link) -> Any:
        ctx.link, ctx.shape = link, x.shape
        # As Megatron's linear layers: beside a frozen weight a bias is not trained either.
        ctx.trains_bias = bias is not None and weight.requires_grad
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        rows, w = _rows(x), weight.t()
        if link.sequence_parallel:

            def run(slices: int) -> torch.Tensor:
                return link.products.gather_matmul(rows, w, link.group, slices)[0]

            y = run(link.slices("column forward", rows, w, run))
        else:
            y = rows @ w
        if bias is not None:
            y = y + bias
        return _shaped(y, (-1, *x.shape[1:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        link: Link = ctx.link
        rows = _rows(dy)
        product = link.products.matmul_scatter if link.sequence_parallel else pipelined.matmul_reduce
        needs_weight = ctx.needs_input_grad[1] and not link.weight_gradient.later(dy)

        def run(slices: int, gradient: WeightGradient = PLAIN) -> tuple[Any, Any]:
            coming = pipelined.gather(_rows(x), link.group) if needs_weight and link.sequence_parallel else None
            dx = product(rows, weight, link.group, slices)
            dw = None
            if needs_weight:
                dw = gradient(rows, _rows(x) if coming is None else coming.wait())
            return dx.wait(), dw

        phase = "column backward" if needs_weight else "column backward without weight"
        dx, dw = run(link.slices(phase, rows, weight, run), link.weight_gradient)
        return _shaped(dx, ctx.shape), dw, rows.sum(dim=0) if ctx.trains_bias else None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, link: Link) -> Any:
        ctx.link, ctx.shape = link, x.shape
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        rows, w = _rows(x), weight.t()
        product = link.products.matmul_scatter if link.sequence_parallel else pipelined.matmul_reduce

        def run(slices: int) -> torch.Tensor:
            return product(rows, w, link.group, slices).wait()

        y = run(link.slices("row forward", rows, w, run))
        return _shaped(y, (-1, *x.shape[1:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        link: Link = ctx.link
        rows: torch.Tensor = _rows(dy)
        total: torch.Tensor | None = rows
        if link.sequence_parallel:

            def run(slices: int) -> tuple[torch.Tensor, torch.Tensor | None]:
                return link.products.gather_matmul(rows, weight, link.group, slices, keep=ctx.needs_input_grad[1])

            dx, total = run(link.slices("row backward", rows, weight, run))
        else:
            dx = rows @ weight
        dw = None
        if ctx.needs_input_grad[1]:
            assert total is not None
            if not link.weight_gradient.later(total.view(-1, *dy.shape[1:])):
                dw = link.weight_gradient(total, _rows(x))
        return _shaped(dx, ctx.shape), dw, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _shaped(rows: torch.Tensor, shape: Any) -> torch.Tensor:
    """`rows`, which nobody else has, in another shape: not as a view, whose storage Megatron would not let go of."""
    return torch.ops.aten._unsafe_view(rows, shape)  # type: ignore[no-any-return]
