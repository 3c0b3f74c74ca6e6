"""bias_dropout_add: against the sums and the dropout that Megatron writes, in single steps and compiled.

Counted as bytes: forward reads x and the residual and writes y; backward reads the gradient and, with dropout, writes
that of x. Counted as operations on each element: two sums forward, one backward, and two more with dropout. With
dropout every contender draws in its own way, so results are not compared here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Contender, Input, Work, by_case, contenders, itemsize


class Shape(NamedTuple):
    """Rows, the width of each, and the share that is dropped."""

    rows: int
    width: int
    p: float


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `ROWSxWIDTH[,p=SHARE]`."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)(?:,p=(0?\.\d+))?", text)
    if match is None:
        raise ValueError("want ROWSxWIDTH, each at least 1, and if wanted p=SHARE below 1: for example 1024x1024,p=0.1")
    rows, width, p = shape = Shape(int(match[1]), int(match[2]), float(match[3] or 0))
    size = rows * width * itemsize(dtype)
    dropped = 2 * (p > 0)
    forward = Work(3 * size, (2 + dropped) * rows * width)
    backward = Work((2 if p else 1) * size, (1 + dropped) * rows * width)
    return Case(
        operator="bias_dropout_add",
        name=f"{rows}x{width}{f' p={p}' if p else ''} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(Input((rows, width)), Input((rows, width)), Input((width,))),
        forward=forward,
        both=forward + backward,
        contenders=contenders(
            Contender(OURS, "mindspeed_lite.ops.bias_dropout_add:bias_dropout_add", {"dropout_p": p}),
            by_case(TORCH, "plain"),
        ),
        is_random=p > 0,
    )


# With Megatron's default share of dropout, and without: a layer of CPU runs, and of Llama 8B.
CASES = Cases(
    syntax="ROWSxWIDTH and, if wanted, p=SHARE",
    example="1024x1024,p=0.1",
    case=case,
    cpu=("1024x1024,p=0.1", "1024x1024", "4096x4096,p=0.1", "4096x4096"),
    accelerator=("8192x4096,p=0.1", "8192x4096"),
    quick=("1024x1024",),
    tiny=("24x48",),
    numerics=("64x1024", "37x1000"),
)
