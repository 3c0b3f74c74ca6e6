"""Cases of my_op, compared with its definition step by step.

Work counts x, y and their gradients. Operations of an element: 10 forward (an exponential, a division), 20 backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mindspeed_lite.ops.case import Draw, OperatorCases, Work
from mindspeed_lite.ops.my_op import my_op


@dataclass(frozen=True)
class Shape:
    """[rows, width]."""

    rows: int
    width: int

    def make(self, draw: Draw) -> tuple[torch.Tensor, ...]:
        return (draw(self.rows, self.width),)

    def ours(self, x: torch.Tensor) -> torch.Tensor:
        return my_op(x)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)

    def work(self, size: int) -> tuple[Work, Work]:
        count = self.rows * self.width
        return Work(2 * count * size, 10 * count), Work(3 * count * size, 20 * count)


CASES = OperatorCases(
    "my_op",
    Shape,
    correctness=("64x1024", "37x1000"),
    cpu=("1024x1024", "4096x14336"),
    accelerator=("4096x14336", "16384x14336"),
)
