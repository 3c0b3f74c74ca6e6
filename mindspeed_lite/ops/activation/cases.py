"""activation: against the functions that a user without us writes, step by step in the tensors' own dtype.

Counted as bytes: forward reads x, bias and weights and writes y; backward reads these and dy, and writes the gradients.
Counted as operations on each element of y: for an exponential, a division and what is around them 10 forward and 20
backward, and one for a bias, for a weight and for a product of halves. None of them is a matmul's, so memory is the
bound on every device.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Input, Work, by_case, contenders, itemsize

# The kinds of the operator; of the gated ones x has both halves.
_GATED = ("swiglu", "geglu", "quick_geglu")
_KINDS = (*_GATED, "gelu", "squared_relu")
# What Liger-Kernel has, without a bias and without weights.
_LIGER = ("swiglu", "geglu", "squared_relu")


class Shape(NamedTuple):
    """Rows, the width of x, the function, and whether there are a bias and weights."""

    rows: int
    width: int
    kind: str
    bias: bool
    weights: bool


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `ROWSxWIDTH[,kind=KIND][,bias=1][,weights=1]`."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)(?:,kind=(\w+))?(,bias=1)?(,weights=1)?", text)
    kind = (match[3] or "swiglu") if match else ""
    if match is None or kind not in _KINDS:
        raise ValueError(
            "want ROWSxWIDTH and, if wanted in this order, "
            f"kind={'|'.join(_KINDS)}, bias=1, weights=1; for example 1024x5632,kind=swiglu"
        )
    rows, width, _, bias, weights = shape = Shape(int(match[1]), int(match[2]), kind, bool(match[4]), bool(match[5]))
    gated = kind in _GATED
    if gated and width % 2:
        raise ValueError(f"{kind} wants an even width")
    half = width // 2 if gated else width
    inputs = [Input((rows, width))]
    inputs += [Input((width,))] * bias + [Input((rows, 1), uniform=True)] * weights
    size, extra = itemsize(dtype), bias * width + weights * rows
    small = bias + weights + gated
    forward = Work((rows * (width + half) + extra) * size, (10 + small) * rows * half)
    backward = Work((rows * (2 * width + half) + 2 * extra) * size, (20 + 2 * small) * rows * half)
    peers = [by_case("liger", "liger", package="liger_kernel")] if kind in _LIGER and not extra else []
    return Case(
        operator="activation",
        name=f"{kind} {rows}x{width}{' bias' * bias}{' weights' * weights} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=tuple(inputs),
        forward=forward,
        both=forward + backward,
        contenders=contenders(by_case(OURS, "ours"), by_case(TORCH, "plain"), *peers),
    )


# The width is that of x. A small model of CPU runs, and Llama's 8B: 14336 of each half.
_CPU = ("1024x5632", "4096x28672", "4096x28672,weights=1", "4096x16384,kind=gelu,bias=1")

CASES = Cases(
    syntax="ROWSxWIDTH and, if wanted in this order, kind=KIND (swiglu), bias=1, weights=1",
    example="1024x5632",
    case=case,
    cpu=_CPU,
    accelerator=(*_CPU, "16384x28672"),
    quick=("1024x5632",),
    tiny=("32x64", "24x48", "24x48,kind=gelu,bias=1", "24x48,kind=squared_relu,weights=1"),
    numerics=(
        "64x1024",
        "37x1000,kind=geglu",
        "64x1024,kind=gelu,bias=1",
        "129x250,kind=swiglu,bias=1,weights=1",
    ),
)
