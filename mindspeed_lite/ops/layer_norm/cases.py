"""layer_norm: against `torch.nn.functional.layer_norm`, which is what Megatron's local norm calls.

Counted as bytes: forward reads x, weight and bias and writes y; backward reads x, the weight and dy and writes dx and
the gradients of weight and bias. The two numbers kept for each row are left out. Counted as operations on each
element: 7 forward (sum, minus mean, square, sum, times 1 / deviation, times weight, plus bias), 13 backward. None of
them is a matmul's, so memory is the bound on every device.
"""

from __future__ import annotations

from mindspeed_lite.ops.case import (
    OURS,
    TORCH,
    Case,
    Cases,
    Contender,
    Input,
    Work,
    by_case,
    contenders,
    itemsize,
    sizes,
)

EPS = 1e-5
_SYNTAX, _EXAMPLE = "ROWSxHIDDEN", "1024x4096"


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `ROWSxHIDDEN`."""
    rows, hidden = shape = sizes(text, _SYNTAX, _EXAMPLE)
    size = itemsize(dtype)
    forward = Work((2 * rows * hidden + 2 * hidden) * size, 7 * rows * hidden)
    backward = Work((3 * rows * hidden + 3 * hidden) * size, 13 * rows * hidden)
    return Case(
        operator="layer_norm",
        name=f"{rows}x{hidden} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(Input((rows, hidden)), Input((hidden,), scale=0.1, offset=1.0), Input((hidden,))),
        forward=forward,
        both=forward + backward,
        contenders=contenders(
            Contender(OURS, "mindspeed_lite.ops.layer_norm:layer_norm", {"eps": EPS}),
            by_case(TORCH, "plain"),
            by_case("liger", "liger", package="liger_kernel"),
        ),
    )


# A small model of CPU runs, and hidden sizes of models with LayerNorm (GPT-3 6.7B and 175B).
_CPU = ("1024x1024", "4096x4096")

CASES = Cases(
    syntax=_SYNTAX,
    example=_EXAMPLE,
    case=case,
    cpu=_CPU,
    accelerator=(*_CPU, "8192x12288"),
    quick=("1024x1024",),
    tiny=("24x48",),
    numerics=("64x1024", "37x1000", "300x64"),
)
