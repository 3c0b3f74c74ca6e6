"""Kernel options and autograd of rope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mindspeed_lite.ops import autograd

if TYPE_CHECKING:
    from mindspeed_lite.ops.rope import Pairs


class RotationSpec(NamedTuple):
    pairs: Pairs
    start: int
    scale: float
    transposed: bool = False

    @property
    def sides(self) -> tuple[bool, bool]:
        """Whether pairs are interleaved in the input, and in the output."""
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
    y: torch.Tensor = autograd.apply(_ROTATION, (x, cos, sin, positions), (turn, how))
    return y


def _forward(inputs: Any, options: tuple[Turn, RotationSpec]) -> tuple[torch.Tensor, autograd.Inputs]:
    turn, how = options
    x, cos, sin, positions = inputs
    return turn(x, cos, sin, positions, how), (cos, sin, positions)


def _backward(
    dy: torch.Tensor, saved: Any, options: tuple[Turn, RotationSpec], wanted: Sequence[bool]
) -> autograd.Inputs:
    turn, how = options
    cos, sin, positions = saved
    return turn(dy, cos, sin, positions, how._replace(transposed=True)), None, None, None


_ROTATION = autograd.Kernel(_forward, _backward)
