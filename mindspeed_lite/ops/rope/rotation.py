"""The autograd rule that a backend's kernel needs: the backward pass is the transposed rotation of dy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from mindspeed_lite.ops.rope import Pairs


class RotationSpec(NamedTuple):
    """What a kernel is told beside its tensors. transposed: of the backward pass."""

    pairs: Pairs
    start: int
    scale: float
    transposed: bool = False

    @property
    def sides(self) -> tuple[bool, bool]:
        """Whether the pairs lie interleaved in what is read, and in what is written."""
        return _SIDES[self.pairs, self.transposed]


_SIDES = {
    (pairs, transposed): (out, into) if transposed else (into, out)
    for pairs, into, out in (("half", False, False), ("interleaved", True, True), ("regrouped", True, False))
    for transposed in (False, True)
}

# (x, cos, sin, positions, how) -> y
Turn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, RotationSpec], torch.Tensor]


def rotate(
    turn: Turn, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None, how: RotationSpec
) -> torch.Tensor:
    """`turn` with its gradient for x."""
    if torch.is_grad_enabled() and x.requires_grad:
        y: torch.Tensor = _Rotation.apply(turn, x, cos, sin, positions, how)  # type: ignore[no-untyped-call]
        return y
    return turn(x, cos, sin, positions, how)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        turn: Turn,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor | None,
        how: RotationSpec,
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin, positions)
        ctx.turn, ctx.how = turn, how
        return turn(x, cos, sin, positions, how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, positions = ctx.saved_tensors
        dx = ctx.turn(dy, cos, sin, positions, ctx.how._replace(transposed=True))
        return None, dx, None, None, None, None
