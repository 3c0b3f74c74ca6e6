"""Cases of rope, compared with Megatron's local implementation.

x is part of a fused projection: only its last dimension is contiguous. cos and sin are cached.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Draw, OperatorCases, Work
from mindspeed_lite.ops.rope import Pairs, rope
from mindspeed_lite.ops.rope.angles import cos_sin


@dataclass(frozen=True)
class Shape:
    """[s, b, n, d]; r: rotated elements per head, 0 for all."""

    s: int
    n: int
    d: int
    b: int = 1
    r: int = 0
    pairs: Pairs = "half"

    def __post_init__(self) -> None:
        if self.width % 2 or self.width > self.d:
            raise ValueError(f"r={self.width} rotary elements: want an even number within d={self.d}")

    @property
    def width(self) -> int:
        return self.r or self.d

    def make(self, draw: Draw) -> tuple[Tensor, ...]:
        """x [s, b, n, d] and angles [s, 1, 1, r]."""
        x = draw(self.s, self.b, self.n, 3, self.d, gradient=False)[..., 1, :].requires_grad_()
        step = 1e4 ** -(torch.arange(0, self.width, 2).float() / self.width)
        angles = torch.arange(self.s).float()[:, None] * step
        both = (angles, angles)
        repeated = torch.stack(both, -1).flatten(-2) if self.pairs == "interleaved" else torch.cat(both, -1)
        return x, draw.of(repeated[:, None, None], wide=True, gradient=False)

    def ours(self, x: Tensor, angles: Tensor) -> Tensor:
        return rope(x, *cos_sin(angles), pairs=self.pairs)

    def reference(self, x: Tensor, angles: Tensor) -> Tensor:
        rotated, rest = x[..., : self.width], x[..., self.width :]
        if self.pairs == "regrouped":
            rotated = torch.cat((rotated[..., 0::2], rotated[..., 1::2]), -1)
        if self.pairs == "interleaved":
            other = torch.stack((-rotated[..., 1::2], rotated[..., 0::2]), -1).flatten(-2)
        else:
            first, second = rotated.chunk(2, -1)
            other = torch.cat((-second, first), -1)
        y = rotated * angles.cos().to(x.dtype) + other * angles.sin().to(x.dtype)
        return torch.cat((y, rest), -1)

    def work(self, size: int) -> tuple[Work, Work]:
        heads = self.s * self.b * self.n
        once = Work(2 * heads * self.d * size + 2 * self.s * self.width * 4, 3 * heads * self.width)
        return once, once


# Llama 8B's queries and keys, multi-latent attention.
_TIMED = ("s=1024,n=16,d=64", "s=4096,n=32,d=128", "s=4096,n=8,d=128", "s=4096,n=16,d=64,pairs=regrouped")

CASES = OperatorCases(
    "rope",
    Shape,
    correctness=(
        "s=128,n=4,d=64",
        "s=100,b=2,n=3,d=80,r=40",
        "s=96,n=4,d=64,pairs=interleaved",
        "s=96,n=4,d=64,pairs=regrouped",
    ),
    cpu=_TIMED,
    accelerator=(*_TIMED, "s=8192,b=2,n=64,d=128", "s=4096,n=32,d=128,pairs=interleaved"),
)
