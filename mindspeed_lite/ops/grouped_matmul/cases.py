"""grouped_matmul: against a loop over the experts' linear layers, and PyTorch's grouped product.

Tokens choose their experts with very different odds, so that groups are uneven; one expert has no rows. Every expert
has a weight of its own: PyTorch's product wants one tensor of all, and joining them is part of its time. Counted as
bytes: forward reads input and weights and writes the output; backward reads those and the output's gradient and
writes the gradients. As operations: those of the products.
"""

from __future__ import annotations

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Input, Work, by_case, contenders, itemsize, sizes

_SYNTAX, _EXAMPLE = "ROWSxINPUTxOUTPUTxEXPERTS", "4096x512x256x16"


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `ROWSxINPUTxOUTPUTxEXPERTS`."""
    rows, k, n, experts = shape = sizes(text, _SYNTAX, _EXAMPLE)
    size, product = itemsize(dtype), 2 * rows * n * k
    forward = Work((rows * (n + k) + experts * n * k) * size, product)
    backward = Work((rows * (n + 2 * k) + 2 * experts * n * k) * size, 2 * product)
    return Case(
        operator="grouped_matmul",
        name=f"{rows}x{k}x{n}x{experts} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(Input((rows, k)), *[Input((n, k), scale=k**-0.5)] * experts),
        forward=forward,
        both=forward + backward,
        contenders=contenders(
            by_case(OURS, "ours"),
            by_case(TORCH, "plain"),
            # It has no float64.
            *([] if dtype == "fp64" else [by_case("torch grouped_mm", "grouped_mm")]),
        ),
    )


# Layers of many small experts and of few large ones; on accelerators those of Qwen3-30B-A3B and Mixtral 8x7B.
CASES = Cases(
    syntax=_SYNTAX,
    example=_EXAMPLE,
    case=case,
    cpu=("12288x512x256x64", "2048x1024x1408x8"),
    accelerator=("65536x2048x1536x128", "16384x4096x28672x8"),
    quick=("1024x256x128x8",),
    tiny=("64x32x16x4", "24x16x32x3"),
    numerics=("300x64x96x4", "37x100x65x3", "513x136x72x9"),
)
