"""Cases of masked_softmax, compared with the steps of Megatron's local attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Draw, OperatorCases, Work
from mindspeed_lite.ops.masked_softmax import masked_softmax


@dataclass(frozen=True)
class Shape:
    """Scores [b, n, sq, sk]; causal or random mask."""

    b: int
    n: int
    sq: int
    sk: int
    causal: bool = True

    def __post_init__(self) -> None:
        if self.causal and self.sq != self.sk:
            raise ValueError(f"a causal mask wants as many queries as keys, not {self.sq} and {self.sk}")

    def make(self, draw: Draw) -> tuple[Tensor, ...]:
        scores = draw(self.b, self.n, self.sq, self.sk, scale=2.0)
        if self.causal:
            mask = torch.ones(1, 1, self.sq, self.sk, dtype=torch.bool).triu(1)
        else:
            mask = torch.rand(self.b, 1, self.sq, self.sk, **draw.options) < 0.25
            mask[..., 0] = False  # no row is hidden completely
        return scores, mask.to(draw.device)

    def ours(self, scores: Tensor, mask: Tensor) -> Tensor:
        return masked_softmax(scores, causal=True) if self.causal else masked_softmax(scores, mask)

    def reference(self, scores: Tensor, mask: Tensor) -> Tensor:
        if scores.dtype.itemsize > 2:
            return scores.masked_fill(mask, -10000.0).softmax(-1)
        return scores.float().masked_fill_(mask, -10000.0).softmax(-1).to(scores.dtype)

    def work(self, size: int) -> tuple[Work, Work]:
        heads, total = self.b * self.n, self.b * self.n * self.sq * self.sk
        visible = heads * self.sq * (self.sq + 1) // 2 if self.causal else total
        mask = 0 if self.causal else self.b * self.sq * self.sk
        forward = Work((visible + total) * size + mask, 5 * visible)
        return forward, Work((2 * visible + total) * size + mask, 7 * visible)


# correctness: lengths that NPUs support.
CASES = OperatorCases(
    "masked_softmax",
    Shape,
    correctness=("1x4x128x128", "2x3x96x160,causal=0", "1x2x32x4096,causal=0"),
    cpu=("1x16x1024x1024", "1x16x1024x1024,causal=0", "1x8x2048x2048"),
    accelerator=("4x16x2048x2048",),
)
