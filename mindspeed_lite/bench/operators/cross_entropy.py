"""cross_entropy: against `torch.nn.functional.cross_entropy` of logits widened to fp32, as Megatron widens them.

Counted as bytes: forward reads the logits; backward reads them and writes their gradient. What there is per row is
left out. Counted as operations on each element: 4 forward (maximum, difference, exponential, sum), 5 backward
(difference, exponential, quotient, the target's one, times the loss's gradient). None of them is a matmul's. The
logits here are a leaf and are used again, so our gradient gets memory of its own, which in a model it does not.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name, peers
from mindspeed_lite.ops.cross_entropy import cross_entropy


def shapes(device: str, quick: bool) -> list[str]:
    """This project's CPU runs, and Llama 3's vocabulary whole and as one of eight ranks has it."""
    if quick:
        return ["256x8192"]
    return ["1024x32768", "512x128256"] + ([] if device == "cpu" else ["8192x32768", "8192x128256", "8192x16032"])


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `ROWSxVOCABULARY`."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", text)
    if match is None:
        raise ValueError("want ROWSxVOCABULARY with both at least 1, for example 1024x32768")
    rows, width = int(match[1]), int(match[2])
    target = torch.randint(0, width, (rows,), generator=torch.Generator().manual_seed(2))

    def make() -> tuple[torch.Tensor, ...]:
        logits = 2 * torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
        return (logits.to(device, dtype).requires_grad_(),)

    def labels(logits: torch.Tensor) -> torch.Tensor:
        nonlocal target
        if target.device != logits.device:
            target = target.to(logits.device)
        return target

    def plain(logits: torch.Tensor) -> torch.Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return torch.nn.functional.cross_entropy(wide, labels(logits), reduction="none")

    def liger() -> Callable[..., torch.Tensor]:
        function: Any = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction
        # It writes the gradient over the logits in the forward pass: these serve every call here, so it gets a copy.
        return lambda logits: function.apply(logits.clone(), labels(logits), None, -100, 0.0, 0.0, "none", None, False)[
            0
        ]

    size = dtype.itemsize
    forward = Work(rows * width * size, 4 * rows * width)
    backward = Work(2 * rows * width * size, 5 * rows * width)
    return Case(
        operator="cross_entropy",
        name=f"{rows}x{width} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=forward,
        both=Work(forward.bytes + backward.bytes, forward.flops + backward.flops),
        contenders=(
            Contender(OURS, lambda: lambda logits: cross_entropy(logits, labels(logits))),
            Contender(TORCH, lambda: plain),
            compiled(lambda: plain),
            *peers(device, ("liger_kernel", Contender("liger", liger))),
        ),
    )
