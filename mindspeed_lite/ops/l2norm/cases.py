"""l2norm: against Megatron's own: a norm for each tensor, and the norm of these on the host.

The tensors are the gradients of a model of the case's dtype, which the optimizer has in fp32 (a model's fp32 and its
16 bits have the same case then; float64 stays itself). Counted as bytes: every tensor is read. Counted as operations on
each element: a product and a sum.
"""

from __future__ import annotations

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Input, Work, by_case, contenders, sizes, wide_itemsize

_SYNTAX, _EXAMPLE = "TENSORSxELEMENTS", "8x1048576"


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `TENSORSxELEMENTS`."""
    count, size = shape = sizes(text, _SYNTAX, _EXAMPLE)
    return Case(
        operator="l2norm",
        name=f"{count}x{size} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(Input((size,), wide=True, gradient=False),) * count,
        forward=Work(count * size * wide_itemsize(dtype), 2 * count * size),
        both=None,
        contenders=contenders(by_case(OURS, "ours"), by_case(TORCH, "plain")),
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
