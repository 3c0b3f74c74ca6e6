"""linear_cross_entropy: against a linear layer and `torch.nn.functional.cross_entropy` of its logits in fp32.

Counted as bytes: forward reads hidden and weight; backward reads both and writes their gradients. The logits are left
out, which is the point. Counted as operations: the three matrix products that a linear layer needs; ours takes a
fourth to have the logits again, and where no 16-bit product can be had in fp32 a fifth.
"""

from __future__ import annotations

import re

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name
from mindspeed_lite.ops.linear_cross_entropy import linear_cross_entropy


def shapes(device: str, quick: bool) -> list[str]:
    """This project's CPU runs, and Llama 3's 8B and its vocabulary as one of eight ranks has it."""
    if quick:
        return ["128x256x4096"]
    return ["1024x1024x32768"] if device == "cpu" else ["8192x4096x32768", "8192x4096x128256", "8192x8192x16032"]


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `ROWSxHIDDENxVOCABULARY`."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)[xX]([1-9]\d*)", text)
    if match is None:
        raise ValueError("want ROWSxHIDDENxVOCABULARY, each at least 1, for example 1024x1024x32768")
    rows, hidden, width = (int(number) for number in match.groups())
    target = torch.randint(0, width, (rows,), generator=torch.Generator().manual_seed(2))

    def make() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(rows, hidden, generator=generator).to(device, dtype)
        weight = torch.randn(width, hidden, generator=generator).mul_(hidden**-0.5).to(device, dtype)
        return x.requires_grad_(), weight.requires_grad_()

    def labels(x: torch.Tensor) -> torch.Tensor:
        nonlocal target
        if target.device != x.device:
            target = target.to(x.device)
        return target

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(x, weight)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return torch.nn.functional.cross_entropy(wide, labels(x), reduction="none")

    once = (rows + width) * hidden * dtype.itemsize
    forward = Work(once, 2 * rows * hidden * width)
    return Case(
        operator="linear_cross_entropy",
        name=f"{rows}x{hidden}x{width} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=forward,
        both=Work(3 * once, 3 * forward.flops),
        contenders=(
            Contender(OURS, lambda: lambda x, weight: linear_cross_entropy(x, weight, labels(x))),
            Contender(TORCH, lambda: plain),
            compiled(lambda: plain),
        ),
    )
