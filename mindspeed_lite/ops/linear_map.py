"""A linear map as autograd sees it: its gradient is its adjoint's, and no tensor is saved for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Map = Callable[[torch.Tensor], torch.Tensor]


def linear_map(x: torch.Tensor, apply: Map, adjoint: Map) -> torch.Tensor:
    """`apply(x)`, whose gradient with respect to x is `adjoint` of that of the result."""
    out: torch.Tensor = _LinearMap.apply(x, apply, adjoint)  # type: ignore[no-untyped-call]
    return out


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, apply: Map, adjoint: Map) -> torch.Tensor:
        ctx.adjoint = adjoint
        return apply(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.adjoint(dy), None, None
