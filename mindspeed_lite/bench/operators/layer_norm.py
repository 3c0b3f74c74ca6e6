"""layer_norm: against `torch.nn.functional.layer_norm`, which is what Megatron's local norm calls.

Counted as bytes: forward reads x, weight and bias and writes y; backward reads x, the weight and dy and writes dx and
the gradients of weight and bias. The two numbers kept for each row are left out. Counted as operations on each
element: 7 forward (sum, minus mean, square, sum, times 1 / deviation, times weight, plus bias), 13 backward. None of
them is a matmul's, so memory is the bound on every device.
"""

from __future__ import annotations

import re

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name
from mindspeed_lite.ops.layer_norm import layer_norm

EPS = 1e-5


def shapes(device: str, quick: bool) -> list[str]:
    """A small model of this project's CPU runs, and hidden sizes of models with LayerNorm (GPT-3 6.7B and 175B)."""
    if quick:
        return ["1024x1024"]
    return ["1024x1024", "4096x4096"] + ([] if device == "cpu" else ["8192x12288"])


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `ROWSxHIDDEN`."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", text)
    if match is None:
        raise ValueError("want ROWSxHIDDEN with both at least 1, for example 1024x4096")
    rows, hidden = int(match[1]), int(match[2])

    def make() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(rows, hidden, generator=generator).to(device, dtype)
        weight = (1 + 0.1 * torch.randn(hidden, generator=generator)).to(device, dtype)
        bias = torch.randn(hidden, generator=generator).to(device, dtype)
        return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()

    size = dtype.itemsize
    forward = Work((2 * rows * hidden + 2 * hidden) * size, 7 * rows * hidden)
    backward = Work((3 * rows * hidden + 3 * hidden) * size, 13 * rows * hidden)
    return Case(
        operator="layer_norm",
        name=f"{rows}x{hidden} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=forward,
        both=Work(forward.bytes + backward.bytes, forward.flops + backward.flops),
        contenders=(
            Contender(OURS, lambda: lambda x, weight, bias: layer_norm(x, weight, bias, EPS)),
            Contender(TORCH, lambda: plain),
            compiled(lambda: plain),
        ),
    )


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What a user without us calls."""
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, EPS)
