"""Cases of linear_cross_entropy, compared with a linear layer and fp32 cross_entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Draw, OperatorCases, Work
from mindspeed_lite.ops.linear_cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Shape:
    """x [rows, hidden], weight [vocabulary, hidden]."""

    rows: int
    hidden: int
    vocabulary: int

    def make(self, draw: Draw) -> tuple[Tensor, ...]:
        weight = draw(self.vocabulary, self.hidden, scale=max(self.hidden, 1) ** -0.5)
        return draw(self.rows, self.hidden), weight, draw.integers(self.vocabulary, self.rows)

    def ours(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, target)

    def reference(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(x, weight)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return torch.nn.functional.cross_entropy(wide, target, reduction="none")

    def work(self, size: int) -> tuple[Work, Work]:
        once = (self.rows + self.vocabulary) * self.hidden * size
        matmul = 2 * self.rows * self.hidden * self.vocabulary
        return Work(once, matmul), Work(2 * once, 2 * matmul)


# Llama 3 8B, unsharded and over eight ranks.
CASES = OperatorCases(
    "linear_cross_entropy",
    Shape,
    correctness=("24x16x48", "128x256x4096"),
    cpu=("1024x1024x32768",),
    accelerator=("8192x4096x32768", "8192x4096x128256", "8192x8192x16032"),
)
