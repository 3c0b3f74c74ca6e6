"""Cases of accumulate_wgrad, compared with autograd's matmul and addition."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad
from mindspeed_lite.ops.case import Draw, OperatorCases, Work


@dataclass(frozen=True)
class Shape:
    """dy [rows, outputs], x [rows, inputs], main_grad [outputs, inputs] in fp32."""

    rows: int
    inputs: int
    outputs: int

    def make(self, draw: Draw) -> tuple[Tensor, ...]:
        main_grad = draw(self.outputs, self.inputs, wide=True, gradient=False)
        return main_grad, draw(self.rows, self.outputs, gradient=False), draw(self.rows, self.inputs, gradient=False)

    def ours(self, main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        return accumulate_wgrad(main_grad, dy, x)

    def reference(self, main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        return main_grad.add_(dy.t() @ x)

    def work(self, size: int) -> tuple[Work, None]:
        moved = self.rows * (self.outputs + self.inputs) * size + 2 * self.outputs * self.inputs * max(4, size)
        return Work(moved, 2 * self.rows * self.outputs * self.inputs), None


CASES = OperatorCases(
    "accumulate_wgrad",
    Shape,
    correctness=("128x64x192", "37x100x65", "1100x130x97"),
    cpu=("1024x1024x3072", "1024x2816x1024", "1024x1024x32768", "4096x1024x3072"),
    accelerator=("8192x4096x6144", "8192x4096x28672", "8192x14336x4096"),
)
