"""my_op: against its definition, as plain PyTorch computes it step by step.

Counted as bytes: forward reads x and writes y; backward reads x and dy and writes dx. Counted as operations on each
element: 10 forward (an exponential, a division and what is around them), 20 backward.
"""

from __future__ import annotations

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Contender, Input, Work, contenders, itemsize, sizes

_SYNTAX, _EXAMPLE = "ROWSxWIDTH", "1024x4096"


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `ROWSxWIDTH`."""
    rows, width = shape = sizes(text, _SYNTAX, _EXAMPLE)
    size = rows * width * itemsize(dtype)
    forward, backward = Work(2 * size, 10 * rows * width), Work(3 * size, 20 * rows * width)
    return Case(
        operator="my_op",
        name=f"{rows}x{width} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(Input((rows, width)),),
        forward=forward,
        both=forward + backward,
        contenders=contenders(
            Contender(OURS, "mindspeed_lite.ops.my_op:my_op"),
            Contender(TORCH, "mindspeed_lite.ops.my_op.reference:my_op"),
        ),
    )


CASES = Cases(
    syntax=_SYNTAX,
    example=_EXAMPLE,
    case=case,
    cpu=("1024x4096", "4096x14336"),
    accelerator=("4096x14336", "16384x14336"),
    quick=("1024x1024",),
    tiny=("24x48",),
    numerics=("64x1024", "37x1000"),
)
