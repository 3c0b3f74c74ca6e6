"""masked_softmax: against the steps one by one, as Megatron's local attention computes them.

Counted as bytes: forward reads the visible scores and writes all probabilities; backward reads the visible scores and
their probabilities' gradients and writes all gradients; both read the mask, where there is one. Under the causal mask
what lies right of the diagonal counts as not visible; a mask that is a tensor has to be read to know, and then all of
it counts as visible. What there is per row is left out. Counted as operations on each visible score: 5 forward
(maximum, difference, exponential, sum, quotient), 7 backward (difference, exponential, quotient, product, sum,
difference, product). None of them is a matmul's. The scale is 1, as Megatron's is unless layers are scaled.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Input, Work, by_case, contenders, itemsize

_PATTERN = re.compile(r"([1-9]\d*)[xX]([1-9]\d*)[xX]([1-9]\d*)[xX]([1-9]\d*)(?:,causal=([01]))?")


class Shape(NamedTuple):
    """Batch, heads, queries, keys; the causal mask, or one that is a tensor."""

    b: int
    n: int
    sq: int
    sk: int
    causal: bool


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `BxNxSQxSK[,causal=0|1]`."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError("want BxNxSQxSK with all at least 1 and, if wanted, causal=0|1 (1); example 1x16x1024x1024")
    batch, heads, queries, keys = (int(match[each]) for each in (1, 2, 3, 4))
    causal = match[5] != "0"
    if causal and queries != keys:
        raise ValueError(f"a causal mask wants as many queries as keys, not {queries} and {keys}")
    size, whole = itemsize(dtype), batch * heads * queries * keys
    visible = batch * heads * queries * (queries + 1) // 2 if causal else whole
    read = 0 if causal else batch * queries * keys
    forward = Work((visible + whole) * size + read, 5 * visible)
    backward = Work((2 * visible + whole) * size + read, 7 * visible)
    return Case(
        operator="masked_softmax",
        name=f"{batch}x{heads}x{queries}x{keys}{'' if causal else ',causal=0'} {dtype}",
        shape=Shape(batch, heads, queries, keys, causal),
        device=device,
        dtype=dtype,
        inputs=(Input((batch, heads, queries, keys), scale=2.0),),
        forward=forward,
        both=forward + backward,
        contenders=contenders(by_case(OURS, "ours"), by_case(TORCH, "plain")),
    )


# CPU runs with both kinds of mask, and a batch of sequences on an accelerator.
CASES = Cases(
    syntax="BxNxSQxSK and, if wanted, causal=0",
    example="1x16x1024x1024",
    case=case,
    cpu=("1x16x1024x1024", "1x16x1024x1024,causal=0", "1x8x2048x2048"),
    accelerator=("4x16x2048x2048",),
    quick=("1x4x128x128",),
    tiny=("1x4x32x32", "2x3x24x24", "2x3x20x24,causal=0"),
    # Lengths that NPUs take.
    numerics=("1x4x128x128", "2x3x96x160,causal=0", "1x2x32x4096,causal=0"),
)
