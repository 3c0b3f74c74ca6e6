"""A column and a row parallel layer, forward and backward, with whatever multiplies and communicates."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed_lite.parallel.tp_linear import (
    AUTOGRAD_WGRAD,
    TPCommConfig,
    column_linear,
    fixed_chunks,
    row_linear,
)


def results(gemm: Any, group: dist.ProcessGroup, dtype: torch.dtype, rows: int, hidden: int, inner: int) -> list[Any]:
    """Output and gradients of the input and both weights, of numbers that depend on the rank alone."""
    generator = torch.Generator().manual_seed(group.rank())

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, dy = numbers(rows, 2, hidden).requires_grad_(), numbers(rows, 2, hidden)
    up, down = (numbers(*shape).div_(16).requires_grad_() for shape in ((inner, hidden), (hidden, inner)))
    comm = TPCommConfig(group, True, fixed_chunks(1), AUTOGRAD_WGRAD, gemm)
    y = row_linear(column_linear(x, up, None, comm), down, comm)
    y.backward(dy)
    return [y.detach(), x.grad, up.grad, down.grad]
