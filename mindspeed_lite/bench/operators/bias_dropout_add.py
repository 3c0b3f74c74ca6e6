"""bias_dropout_add: against the sums and the dropout that Megatron writes, in single steps and compiled.

Counted as bytes: forward reads x and the residual and writes y; backward reads the gradient and, with dropout, writes
that of x. Counted as operations on each element: two sums forward, one backward, and two more with dropout. With
dropout every contender draws in its own way, so results are not compared here.
"""

from __future__ import annotations

import re

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name
from mindspeed_lite.ops.bias_dropout_add import bias_dropout_add


def shapes(device: str, quick: bool) -> list[str]:
    """With Megatron's default share of dropout, and without: a layer of this project's CPU runs, and of Llama 8B."""
    if quick:
        return ["1024x1024"]
    sizes = ["1024x1024", "4096x4096"] if device == "cpu" else ["8192x4096"]
    return [f"{size}{dropout}" for size in sizes for dropout in (",p=0.1", "")]


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `ROWSxWIDTH[,p=SHARE]`."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)(?:,p=(0?\.\d+))?", text)
    if match is None:
        raise ValueError("want ROWSxWIDTH, each at least 1, and if wanted p=SHARE below 1: for example 1024x1024,p=0.1")
    rows, width, p = int(match[1]), int(match[2]), float(match[3] or 0)

    def make() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        made = [torch.randn(*shape, generator=generator) for shape in ((rows, width), (rows, width), (width,))]
        return tuple(each.to(device, dtype).requires_grad_() for each in made)

    def ours(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return bias_dropout_add(x, residual, bias, p)

    def plain(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return residual + torch.nn.functional.dropout(x + bias, p=p)

    size = rows * width * dtype.itemsize
    dropped = 2 * (p > 0)
    forward = Work(3 * size, (2 + dropped) * rows * width)
    backward = Work((2 if p else 1) * size, (1 + dropped) * rows * width)
    return Case(
        operator="bias_dropout_add",
        name=f"{rows}x{width}{f' p={p}' if p else ''} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=forward,
        both=Work(forward.bytes + backward.bytes, forward.flops + backward.flops),
        contenders=(Contender(OURS, lambda: ours), Contender(TORCH, lambda: plain), compiled(lambda: plain)),
        draws=p > 0,
    )
