"""rms_norm: against `torch.nn.functional.rms_norm`, which is what Megatron's local norm calls.

Counted as bytes: forward reads x and the weight and writes y; backward reads x, the weight and dy and writes dx and
the weight's gradient. The one number kept for each row is left out. Counted as operations on each element: 4
forward (square, sum, times 1 / rms, times weight), 9 backward (x dy, its sum over rows and its weighted sum over
the row, and dx). None of them is a matmul's, so memory is the bound on every device.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Shape(NamedTuple):
    """Rows, and the width of each; zero_centered: the weight stands for 1 + weight."""

    rows: int
    hidden: int
    zero_centered: bool = False


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `ROWSxHIDDEN`."""
    rows, hidden = sizes(text, _SYNTAX, _EXAMPLE)
    return _of(Shape(rows, hidden), device, dtype)


def _of(shape: Shape, device: str, dtype: str) -> Case:
    rows, hidden, zero_centered = shape
    size = itemsize(dtype)
    forward = Work((2 * rows * hidden + hidden) * size, 4 * rows * hidden)
    backward = Work((3 * rows * hidden + 2 * hidden) * size, 9 * rows * hidden)
    options = {"eps": EPS, "zero_centered": zero_centered}
    return Case(
        operator="rms_norm",
        name=f"{rows}x{hidden}{' 1 + weight' if zero_centered else ''} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=() if zero_centered else (Input((rows, hidden)), Input((hidden,), scale=0.1, offset=1.0)),
        forward=forward,
        both=forward + backward,
        contenders=contenders(
            Contender(OURS, "mindspeed_lite.ops.rms_norm:rms_norm", options),
            by_case(TORCH, "plain"),
            by_case("liger", "liger", package="liger_kernel"),
            by_case("transformer_engine", "transformer_engine", package="transformer_engine"),
        ),
    )


def _variants(device: str, dtype: str) -> tuple[Case, ...]:
    return (_of(Shape(64, 1024, True), device, dtype),)


# A small model of CPU runs, Llama's hidden sizes 4096 (8B) and 8192 (70B), and heads (QK-norm).
_CPU = ("1024x1024", "4096x4096", "4096x8192", "65536x64")

CASES = Cases(
    syntax=_SYNTAX,
    example=_EXAMPLE,
    case=case,
    cpu=_CPU,
    accelerator=(*_CPU, "16384x8192"),
    quick=("1024x1024",),
    tiny=("32x64", "24x48"),
    numerics=("64x1024", "37x1000", "512x4096", "300x64"),
    variants=_variants,
)
