"""accumulate_wgrad: against the product and the addition that autograd and a gradient hook make of it.

The operator adds in place, and a case must give the same at every call: every contender adds to a main gradient that
has just been zeroed, as in the first micro-batch, and zeroing is part of all times. Counted as bytes forward: dy and x
read, main_grad zeroed, read and written; as operations: those of the product. The backward pass, which a training step
does not have here, is that of the formula: two products with the output's gradient.
"""

from __future__ import annotations

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Input, Work, by_case, contenders, itemsize, sizes

_SYNTAX, _EXAMPLE = "ROWSxINPUTxOUTPUT", "1024x1024x3072"


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `ROWSxINPUTxOUTPUT`."""
    rows, k, n = shape = sizes(text, _SYNTAX, _EXAMPLE)
    inputs, product, main = rows * (n + k) * itemsize(dtype), 2 * rows * n * k, n * k * itemsize("fp32")
    forward = Work(inputs + 3 * main, product)
    backward = Work(2 * inputs + main, 2 * product)
    return Case(
        operator="accumulate_wgrad",
        name=f"{rows}x{k}x{n} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(Input((rows, n)), Input((rows, k))),
        forward=forward,
        both=forward + backward,
        contenders=contenders(
            by_case(OURS, "ours"),
            by_case(TORCH, "plain"),
            by_case("apex", "apex", package="fused_weight_gradient_mlp_cuda"),
        ),
    )


# The layers of CPU runs (query-key-value, MLP, output layer), and Llama 8B's MLP.
CASES = Cases(
    syntax=_SYNTAX,
    example=_EXAMPLE,
    case=case,
    cpu=("1024x1024x3072", "1024x2816x1024", "1024x1024x32768", "4096x1024x3072"),
    accelerator=("8192x4096x6144", "8192x4096x28672", "8192x14336x4096"),
    quick=("1024x1024x3072",),
    tiny=("64x128x192",),
    numerics=("128x64x192", "37x100x65", "1100x130x97"),
)
