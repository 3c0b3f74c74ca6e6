"""activation: against the functions that a user without us writes, step by step in the tensors' own dtype.

Counted as bytes: forward reads x, bias and weights and writes y; backward reads these and dy, and writes the gradients.
Counted as operations on each element of y: for an exponential, a division and what is around them 10 forward and 20
backward, and one for a bias, for a weight and for a product of halves. None of them is a matmul's, so memory is the
bound on every device.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name, peers
from mindspeed_lite.ops.activation import KINDS, activation
from mindspeed_lite.ops.activation.reference import GATED

_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": lambda x: F.gelu(x, approximate="tanh"),
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "squared_relu": lambda x: F.relu(x).square(),
}


def shapes(device: str, quick: bool) -> list[str]:
    """The width is that of x. A small model of this project's CPU runs, and Llama's 8B: 14336 of each half."""
    if quick:
        return ["1024x5632"]
    small = ["1024x5632", "4096x28672", "4096x28672,weights=1", "4096x16384,kind=gelu,bias=1"]
    return small + ([] if device == "cpu" else ["16384x28672"])


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `ROWSxWIDTH[,kind=KIND][,bias=1][,weights=1]`."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)(?:,kind=(\w+))?(,bias=1)?(,weights=1)?", text)
    kind = (match[3] or "swiglu") if match else ""
    if match is None or kind not in KINDS:
        raise ValueError(
            "want ROWSxWIDTH and, if wanted in this order, "
            f"kind={'|'.join(KINDS)}, bias=1, weights=1; for example 1024x5632,kind=swiglu"
        )
    rows, width, has_bias, has_weights = int(match[1]), int(match[2]), bool(match[4]), bool(match[5])
    gated = kind in GATED
    if gated and width % 2:
        raise ValueError(f"{kind} wants an even width")
    half = width // 2 if gated else width

    def make() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        made = [torch.randn(rows, width, generator=generator).to(device, dtype)]
        if has_bias:
            made.append(torch.randn(width, generator=generator).to(device, dtype))
        if has_weights:
            made.append(torch.rand(rows, 1, generator=generator).to(device, dtype))
        return tuple(each.requires_grad_() for each in made)

    def given(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rest = list(tensors)
        bias = rest.pop(0) if has_bias else None
        return bias, rest.pop(0) if has_weights else None

    def ours(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        bias, weights = given(rest)
        return activation(x, kind, bias, weights)

    def plain(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        bias, weights = given(rest)
        if bias is not None:
            x = x + bias
        if gated:
            gate, up = x.chunk(2, -1)
            y = _FUNCTIONS[kind](gate) * up
        else:
            y = _FUNCTIONS[kind](x)
        return y if weights is None else y * weights

    size, extra = dtype.itemsize, has_bias * width + has_weights * rows
    small = has_bias + has_weights + gated
    forward = Work((rows * (width + half) + extra) * size, (10 + small) * rows * half)
    backward = Work((rows * (2 * width + half) + 2 * extra) * size, (20 + 2 * small) * rows * half)
    with_what = "".join([" bias" * has_bias, " weights" * has_weights])
    rivals = peers(device, ("liger_kernel", Contender("liger", _liger))) if kind == "swiglu" and not extra else ()
    return Case(
        operator="activation",
        name=f"{kind} {rows}x{width}{with_what} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=forward,
        both=Work(forward.bytes + backward.bytes, forward.flops + backward.flops),
        contenders=(Contender(OURS, lambda: ours), Contender(TORCH, lambda: plain), compiled(lambda: plain), *rivals),
    )


def _liger() -> Any:
    function: Any = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction

    def run(x: torch.Tensor) -> torch.Tensor:
        # It takes the halves as tensors of their own, and writes their gradients in their places.
        gate, up = (half.contiguous() for half in x.chunk(2, -1))
        y: torch.Tensor = function.apply(gate, up)
        return y

    return run
