"""permute and unpermute: against what Megatron's dispatchers compute, with sorts of the map and sums by scatter_add.

Every token goes to TOPK experts, its rows are weighted and summed again; probs are fp32 as a router makes them. Only
what is in between differs from a layer: the experts are left out.

Counted as bytes: forward reads each token and writes its rows, reads the rows and writes the sums; backward the same
with gradients, and the rows again for the gradient of probs. The map and what there is per row are left out. Counted as
operations on each number of a row: 2 forward (times prob, sum), 4 backward (times prob, product with the row, two
sums). None of them is a matmul's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Work, by_case, contenders, itemsize


class Shape(NamedTuple):
    """Tokens, their width, the experts, and how many of these each token goes to."""

    tokens: int
    hidden: int
    experts: int
    topk: int


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `TOKENSxHIDDENxEXPERTSxTOPK`."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)[xX]([1-9]\d*)[xX]([1-9]\d*)", text)
    if match is None or int(match[4]) > int(match[3]):
        raise ValueError("want TOKENSxHIDDENxEXPERTSxTOPK, each at least 1 and TOPK of EXPERTS, like 4096x512x64x6")
    tokens, hidden, experts, topk = shape = Shape(*map(int, match.groups()))
    count = tokens * topk
    one, many = tokens * hidden * itemsize(dtype), count * hidden * itemsize(dtype)
    forward = Work(2 * (one + many), 2 * count * hidden)
    backward = Work(2 * one + 3 * many, 4 * count * hidden)
    return Case(
        operator="permute",
        name=f"{tokens}x{hidden}x{experts}x{topk} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(),
        forward=forward,
        both=forward + backward,
        contenders=contenders(by_case(OURS, "ours"), by_case(TORCH, "plain")),
    )


# Many small experts, and few large ones.
_CPU = ("4096x512x64x6", "2048x1024x8x2")

CASES = Cases(
    syntax="TOKENSxHIDDENxEXPERTSxTOPK",
    example="4096x512x64x6",
    case=case,
    cpu=_CPU,
    accelerator=(*_CPU, "8192x7168x256x8"),
    quick=("512x256x16x4",),
    tiny=("32x64x4x2", "24x48x6x2"),
    numerics=("64x1024x8x2", "37x1000x12x1", "300x64x64x6"),
)
