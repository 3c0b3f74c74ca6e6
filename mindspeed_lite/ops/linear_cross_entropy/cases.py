"""linear_cross_entropy: against a linear layer and `torch.nn.functional.cross_entropy` of its logits in fp32.

Counted as bytes: forward reads hidden and weight; backward reads both and writes their gradients. The logits are left
out, which is the point. Counted as operations: the three matrix products that a linear layer needs; ours takes a
fourth to have the logits again, and where no 16-bit product can be had in fp32 a fifth.
"""

from __future__ import annotations

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Input, Work, by_case, contenders, itemsize, sizes

_SYNTAX, _EXAMPLE = "ROWSxHIDDENxVOCABULARY", "1024x1024x32768"


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `ROWSxHIDDENxVOCABULARY`."""
    rows, hidden, width = shape = sizes(text, _SYNTAX, _EXAMPLE)
    once = (rows + width) * hidden * itemsize(dtype)
    product = 2 * rows * hidden * width
    return Case(
        operator="linear_cross_entropy",
        name=f"{rows}x{hidden}x{width} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(Input((rows, hidden)), Input((width, hidden), scale=hidden**-0.5)),
        forward=Work(once, product),
        both=Work(3 * once, 3 * product),
        contenders=contenders(
            by_case(OURS, "ours"), by_case(TORCH, "plain"), by_case("liger", "liger", package="liger_kernel")
        ),
    )


# CPU runs, and Llama 3's 8B and its vocabulary as one of eight ranks has it.
CASES = Cases(
    syntax=_SYNTAX,
    example=_EXAMPLE,
    case=case,
    cpu=("1024x1024x32768",),
    accelerator=("8192x4096x32768", "8192x4096x128256", "8192x8192x16032"),
    quick=("128x256x4096",),
    tiny=("24x16x48",),
)
