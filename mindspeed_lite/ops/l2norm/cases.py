"""Cases of l2norm, compared with Megatron's, without host transfers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Draw, OperatorCases, Work
from mindspeed_lite.ops.l2norm import l2norm


@dataclass(frozen=True)
class Shape:
    tensors: int
    elements: int

    def make(self, draw: Draw) -> list[Tensor]:
        return [draw(self.elements, wide=True, gradient=False) for _ in range(self.tensors)]

    def ours(self, *tensors: Tensor) -> Tensor:
        return l2norm(tensors)

    def reference(self, *tensors: Tensor) -> Tensor:
        norms = [torch.linalg.vector_norm(each) for each in tensors]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

    def work(self, size: int) -> tuple[Work, None]:
        count = self.tensors * self.elements
        return Work(count * max(4, size), 2 * count), None


_TIMED = ("256x4096", "8x1048576", "4x16777216")

CASES = OperatorCases(
    "l2norm",
    Shape,
    correctness=("3x1000", "2x65537"),
    cpu=_TIMED,
    accelerator=(*_TIMED, "16x67108864"),
    quick="8x65536",
)
