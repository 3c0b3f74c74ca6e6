"""cross_entropy: against `torch.nn.functional.cross_entropy` of logits widened to fp32, as Megatron widens them.

Counted as bytes: forward reads the logits; backward reads them and writes their gradient. What there is per row is
left out. Counted as operations on each element: 4 forward (maximum, difference, exponential, sum), 5 backward
(difference, exponential, quotient, the target's one, times the loss's gradient). None of them is a matmul's. The
logits here are a leaf and are used again, so our gradient gets memory of its own, which in a model it does not.
"""

from __future__ import annotations

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Input, Work, by_case, contenders, itemsize, sizes

_SYNTAX, _EXAMPLE = "ROWSxVOCABULARY", "1024x32768"


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `ROWSxVOCABULARY`."""
    rows, width = shape = sizes(text, _SYNTAX, _EXAMPLE)
    forward = Work(rows * width * itemsize(dtype), 4 * rows * width)
    backward = Work(2 * rows * width * itemsize(dtype), 5 * rows * width)
    return Case(
        operator="cross_entropy",
        name=f"{rows}x{width} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(Input((rows, width), scale=2.0),),
        forward=forward,
        both=forward + backward,
        contenders=contenders(
            by_case(OURS, "ours"), by_case(TORCH, "plain"), by_case("liger", "liger", package="liger_kernel")
        ),
    )


# CPU runs, and Llama 3's vocabulary whole and as one of eight ranks has it.
_CPU = ("1024x32768", "512x128256")

CASES = Cases(
    syntax=_SYNTAX,
    example=_EXAMPLE,
    case=case,
    cpu=_CPU,
    accelerator=(*_CPU, "8192x32768", "8192x128256", "8192x16032"),
    quick=("256x8192",),
    tiny=("24x48",),
)
