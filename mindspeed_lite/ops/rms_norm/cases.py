"""Cases of rms_norm, compared with `torch.nn.functional.rms_norm` (Megatron's local norm)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Draw, OperatorCases, Work
from mindspeed_lite.ops.rms_norm import rms_norm

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """[rows, hidden]."""

    rows: int
    hidden: int
    zero_centered: bool = False

    def make(self, draw: Draw) -> tuple[Tensor, ...]:
        """x, and a weight for which 1 + weight is exact."""
        x, weight = draw(self.rows, self.hidden), draw(self.hidden, scale=0.1, offset=1.0)
        return x, (weight.detach() - 1).requires_grad_() if self.zero_centered else weight

    def ours(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, eps=EPS, zero_centered=self.zero_centered)

    def reference(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (self.hidden,), 1 + weight if self.zero_centered else weight, EPS)

    def work(self, size: int) -> tuple[Work, Work]:
        rows, hidden = self.rows, self.hidden
        forward = Work((2 * rows * hidden + hidden) * size, 4 * rows * hidden)
        return forward, Work((3 * rows * hidden + 2 * hidden) * size, 9 * rows * hidden)


# Llama 8B and 70B, and heads (QK norm).
_TIMED = ("1024x1024", "4096x4096", "4096x8192", "65536x64")

CASES = OperatorCases(
    "rms_norm",
    Shape,
    correctness=("64x1024", "64x1024,zero_centered=1", "37x1000", "512x4096", "300x64"),
    cpu=_TIMED,
    accelerator=(*_TIMED, "16384x8192"),
)
