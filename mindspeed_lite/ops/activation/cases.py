"""Cases of activation, compared with unfused PyTorch in the tensors' dtype.

Work counts x, bias, weights, y and their gradients. Operations per element of y: 10 forward and 20 backward, plus 1
and 2 for each of bias, weights and gating.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mindspeed_lite.ops.activation import activation
from mindspeed_lite.ops.activation.reference import GATED, PLAIN
from mindspeed_lite.ops.case import Draw, OperatorCases, Work


@dataclass(frozen=True)
class Shape:
    """x [rows, width], both halves of a gated kind; bias [width], weights [rows, 1]."""

    rows: int
    width: int
    kind: Literal["swiglu", "geglu", "quick_geglu", "gelu", "squared_relu"] = "swiglu"
    bias: bool = False
    weights: bool = False

    def __post_init__(self) -> None:
        if self.is_gated and self.width % 2:
            raise ValueError(f"{self.kind} wants an even width")

    @property
    def is_gated(self) -> bool:
        return self.kind in GATED

    def make(self, draw: Draw) -> list[Tensor]:
        made = [draw(self.rows, self.width)]
        if self.bias:
            made.append(draw(self.width))
        if self.weights:
            made.append(draw.of(torch.rand(self.rows, 1, **draw.options)))
        return made

    def ours(self, x: Tensor, *rest: Tensor) -> Tensor:
        bias, weights = _split(self, rest)
        return activation(x, self.kind, bias, weights)

    def reference(self, x: Tensor, *rest: Tensor) -> Tensor:
        bias, weights = _split(self, rest)
        if bias is not None:
            x = x + bias
        if self.is_gated:
            gate, up = x.chunk(2, -1)
            y = GATED[self.kind](gate) * up
        else:
            y = PLAIN[self.kind](x)
        return y if weights is None else y * weights

    def work(self, size: int) -> tuple[Work, Work]:
        rows, width = self.rows, self.width
        out = width // 2 if self.is_gated else width
        extra, small = self.bias * width + self.weights * rows, self.bias + self.weights + self.is_gated
        forward = Work((rows * (width + out) + extra) * size, (10 + small) * rows * out)
        return forward, Work((rows * (2 * width + out) + 2 * extra) * size, (20 + 2 * small) * rows * out)


def _split(shape: Shape, rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    return rest[0] if shape.bias else None, rest[-1] if shape.weights else None


# A small model, and Llama 8B (14336 per half).
_TIMED = ("1024x5632", "4096x28672", "4096x28672,weights=1", "4096x16384,kind=gelu,bias=1")

CASES = OperatorCases(
    "activation",
    Shape,
    correctness=(
        "64x1024",
        "37x1000,kind=geglu",
        "64x1024,kind=gelu,bias=1",
        "129x250,kind=swiglu,bias=1,weights=1",
    ),
    not_on_npu=("24x48,kind=squared_relu,weights=1", "24x48,kind=quick_geglu"),
    cpu=_TIMED,
    accelerator=(*_TIMED, "16384x28672"),
)
