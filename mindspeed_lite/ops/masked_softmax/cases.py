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


def inputs(shape: Shape, draw: Draw) -> tuple[Tensor, ...]:
    scores = draw(shape.b, shape.n, shape.sq, shape.sk, scale=2.0)
    if shape.causal:
        mask = torch.ones(1, 1, shape.sq, shape.sk, dtype=torch.bool).triu(1)
    else:
        mask = torch.rand(shape.b, 1, shape.sq, shape.sk, **draw.options) < 0.25
        mask[..., 0] = False  # no row is hidden completely
    return scores, mask.to(draw.device)


def ours(shape: Shape, scores: Tensor, mask: Tensor) -> Tensor:
    return masked_softmax(scores, causal=True) if shape.causal else masked_softmax(scores, mask)


def reference(shape: Shape, scores: Tensor, mask: Tensor) -> Tensor:
    if scores.dtype.itemsize > 2:
        return scores.masked_fill(mask, -10000.0).softmax(-1)
    return scores.float().masked_fill_(mask, -10000.0).softmax(-1).to(scores.dtype)


def work(shape: Shape, size: int) -> tuple[Work, Work]:
    heads, total = shape.b * shape.n, shape.b * shape.n * shape.sq * shape.sk
    visible = heads * shape.sq * (shape.sq + 1) // 2 if shape.causal else total
    mask = 0 if shape.causal else shape.b * shape.sq * shape.sk
    forward = Work((visible + total) * size + mask, 5 * visible)
    return forward, Work((2 * visible + total) * size + mask, 7 * visible)


# correctness: lengths that NPUs support.
CASES = OperatorCases(
    operator="masked_softmax",
    shape=Shape,
    inputs=inputs,
    ours=ours,
    reference=reference,
    work=work,
    correctness=("1x4x128x128", "2x3x96x160,causal=0", "1x2x32x4096,causal=0"),
    cpu=("1x16x1024x1024", "1x16x1024x1024,causal=0", "1x8x2048x2048"),
    accelerator=("4x16x2048x2048",),
    quick="1x4x128x128",
)
