"""vocab_embedding: against an embedding with assignments to masked positions, as Megatron has it.

The slice is one of four, so that three ids of four are masked. Counted as bytes: forward reads a row for each id that
is here and writes one for each; backward reads the output's gradient and writes the weight's. No arithmetic worth the
name but the sums of the gradient.

With `main=1` the slice is the whole vocabulary, and the case is what a micro-batch does to it: the lookup, the gradient
for a given one of the output, and its addition to an fp32 main gradient. Counted as bytes: a row read and one written
for each id, the output's gradient read, and as many rows of the main gradient read and written.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Input, Work, by_case, contenders, itemsize, wide_itemsize

SLICES = 4


class Shape(NamedTuple):
    """Ids, the width of a row, and the rows of the slice."""

    ids: int
    hidden: int
    rows: int


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `IDSxHIDDENxROWS`, with `,main=1` up to the main gradient."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)[xX]([1-9]\d*)(,main=1)?", text)
    if match is None:
        raise ValueError("want IDSxHIDDENxROWS, each at least 1, and if wanted ,main=1: for example 1024x1024x8192")
    shape = Shape(*(int(number) for number in match.groups()[:3]))
    return (_accumulated if match[4] else _slice)(shape, device, dtype)


def _slice(shape: Shape, device: str, dtype: str) -> Case:
    count, hidden, rows = shape
    size = itemsize(dtype)
    forward = Work((count + count // SLICES) * hidden * size, 0)
    backward = Work((count + rows) * hidden * size, count * hidden)
    return Case(
        operator="vocab_embedding",
        name=f"{count}x{hidden}x{rows} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(Input((rows, hidden)),),
        forward=forward,
        both=forward + backward,
        contenders=contenders(by_case(OURS, "slice_ours"), by_case(TORCH, "slice_plain")),
    )


def _accumulated(shape: Shape, device: str, dtype: str) -> Case:
    count, hidden, rows = shape
    moved = count * hidden * (3 * itemsize(dtype) + 2 * wide_itemsize(dtype))
    return Case(
        operator="vocab_embedding",
        name=f"{count}x{hidden}x{rows} main {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(
            Input((rows, hidden), gradient=False),
            Input((count, hidden), gradient=False),
            Input((rows, hidden), scale=0.0, wide=True, gradient=False),
        ),
        forward=Work(moved, count * hidden),
        both=None,
        contenders=contenders(
            by_case(OURS, "accumulated_ours"),
            by_case(TORCH, "accumulated_plain"),
            by_case("liger", "accumulated_liger", package="liger_kernel"),
        ),
    )


# A rank's slice of vocabularies of 32k and 128k.
CASES = Cases(
    syntax="IDSxHIDDENxROWS and, if wanted, main=1",
    example="1024x1024x8192",
    case=case,
    cpu=("1024x1024x8192", "1024x1024x32768,main=1"),
    accelerator=("8192x4096x8192", "8192x4096x32064", "8192x4096x128256,main=1"),
    quick=("256x256x1024",),
    tiny=("24x16x32", "24x16x32,main=1"),
)
