"""adamw: against what Megatron's step is without it: clipping, torch's AdamW, and the copy into 16 bits.

Counted as bytes: parameter and both moments, in fp32, are read and written, the gradient, in fp32, is read, the copy is
written. Counted as operations on each element: 1 to scale, 1 to decay, 3 and 4 for the moments, 5 for the parameter.
The dtype is that of the copy.
"""

from __future__ import annotations

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Work, by_case, itemsize, sizes, wide_itemsize
from mindspeed_lite.ops.case import contenders as together

_SYNTAX, _EXAMPLE = "TENSORSxELEMENTS", "8x1048576"


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `TENSORSxELEMENTS`."""
    count, size = shape = sizes(text, _SYNTAX, _EXAMPLE)
    ours, plain, compiled = together(by_case(OURS, "ours"), by_case(TORCH, "plain"))
    return Case(
        operator="adamw",
        name=f"{count}x{size} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(),
        forward=Work((7 * wide_itemsize(dtype) + itemsize(dtype)) * count * size, 14 * count * size),
        both=None,
        contenders=(ours, plain, by_case("torch fused", "fused"), compiled),
    )


# A few matrices, many small ones, and a layer or two of a large model.
_CPU = ("256x4096", "8x1048576", "4x16777216")

CASES = Cases(
    syntax=_SYNTAX,
    example=_EXAMPLE,
    case=case,
    cpu=_CPU,
    accelerator=(*_CPU, "16x67108864"),
    quick=("8x65536",),
    tiny=("3x40",),
    numerics=("3x1000", "2x65537"),
)
