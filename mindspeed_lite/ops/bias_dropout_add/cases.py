"""Cases of bias_dropout_add, compared with Megatron's steps unless random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lite.ops.bias_dropout_add import bias_dropout_add
from mindspeed_lite.ops.case import Draw, OperatorCases, Work


@dataclass(frozen=True)
class Shape:
    """[rows, width]; p: dropout probability."""

    rows: int
    width: int
    p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise ValueError(f"p is at least 0 and below 1, not {self.p}")

    def make(self, draw: Draw) -> tuple[Tensor, ...]:
        return draw(self.rows, self.width), draw(self.rows, self.width), draw(self.width)

    def ours(self, x: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        return bias_dropout_add(x, residual, bias, dropout_p=self.p)

    def reference(self, x: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        return residual + torch.nn.functional.dropout(x + bias, p=self.p)

    def work(self, size: int) -> tuple[Work, Work]:
        count, dropped = self.rows * self.width, 2 * (self.p > 0)
        forward = Work(3 * count * size, (2 + dropped) * count)
        return forward, Work((2 if dropped else 1) * count * size, (1 + dropped) * count)


CASES = OperatorCases(
    "bias_dropout_add",
    Shape,
    correctness=("64x1024", "37x1000"),
    cpu=("1024x1024", "1024x1024,p=0.1", "4096x4096,p=0.1", "4096x4096"),
    accelerator=("8192x4096,p=0.1", "8192x4096"),
    is_random=lambda shape: bool(shape.p),
)
