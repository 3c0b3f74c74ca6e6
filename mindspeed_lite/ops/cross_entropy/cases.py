"""Cases of cross_entropy, compared with PyTorch's of fp32 logits (Megatron).

The logits are a leaf, so the gradient cannot overwrite them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Draw, OperatorCases, Work
from mindspeed_lite.ops.cross_entropy import cross_entropy


@dataclass(frozen=True)
class Shape:
    """[rows, vocabulary]."""

    rows: int
    vocabulary: int

    def make(self, draw: Draw) -> tuple[Tensor, ...]:
        return draw(self.rows, self.vocabulary, scale=2.0), draw.integers(self.vocabulary, self.rows)

    def ours(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels)

    def reference(self, logits: Tensor, labels: Tensor) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return torch.nn.functional.cross_entropy(wide, labels, reduction="none")

    def work(self, size: int) -> tuple[Work, Work]:
        count = self.rows * self.vocabulary
        return Work(count * size, 4 * count), Work(2 * count * size, 5 * count)


_TIMED = ("1024x32768", "512x128256")

CASES = OperatorCases(
    "cross_entropy",
    Shape,
    correctness=("24x48", "256x8192"),
    cpu=_TIMED,
    accelerator=(*_TIMED, "8192x32768", "8192x128256", "8192x16032"),
)
