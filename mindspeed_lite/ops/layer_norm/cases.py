"""Cases of layer_norm, compared with `torch.nn.functional.layer_norm` (Megatron's local norm)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Draw, OperatorCases, Work
from mindspeed_lite.ops.layer_norm import layer_norm

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """[rows, hidden]."""

    rows: int
    hidden: int

    def make(self, draw: Draw) -> tuple[Tensor, ...]:
        return draw(self.rows, self.hidden), draw(self.hidden, scale=0.1, offset=1.0), draw(self.hidden)

    def ours(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(x, weight, bias, eps=EPS)

    def reference(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (self.hidden,), weight, bias, EPS)

    def work(self, size: int) -> tuple[Work, Work]:
        rows, hidden = self.rows, self.hidden
        forward = Work((2 * rows * hidden + 2 * hidden) * size, 7 * rows * hidden)
        return forward, Work((3 * rows * hidden + 3 * hidden) * size, 13 * rows * hidden)


# GPT-3 6.7B and 175B.
CASES = OperatorCases(
    "layer_norm",
    Shape,
    correctness=("64x1024", "37x1000", "300x64"),
    cpu=("1024x1024", "4096x4096"),
    accelerator=("1024x1024", "4096x4096", "8192x12288"),
)
