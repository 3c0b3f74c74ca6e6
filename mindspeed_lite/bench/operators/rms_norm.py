"""rms_norm: against `torch.nn.functional.rms_norm`, which is what Megatron's local norm calls.

Counted as bytes: forward reads x and the weight and writes y; backward reads x, the weight and dy and writes dx and
the weight's gradient. The one number kept for each row is left out. Counted as operations on each element: 4
forward (square, sum, times 1 / rms, times weight), 9 backward (x dy, its sum over rows and its weighted sum over
the row, and dx). None of them is a matmul's, so memory is the bound on every device.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name, peers
from mindspeed_lite.ops.rms_norm import rms_norm

EPS = 1e-5


def shapes(device: str, quick: bool) -> list[str]:
    """A small model of this project's CPU runs, Llama's hidden sizes 4096 (8B) and 8192 (70B), and heads (QK-norm)."""
    if quick:
        return ["1024x1024"]
    return ["1024x1024", "4096x4096", "4096x8192", "65536x64"] + ([] if device == "cpu" else ["16384x8192"])


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
        return x.requires_grad_(), weight.requires_grad_()

    size = dtype.itemsize
    forward = Work((2 * rows * hidden + hidden) * size, 4 * rows * hidden)
    backward = Work((3 * rows * hidden + 2 * hidden) * size, 9 * rows * hidden)
    return Case(
        operator="rms_norm",
        name=f"{rows}x{hidden} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=forward,
        both=Work(forward.bytes + backward.bytes, forward.flops + backward.flops),
        contenders=(
            Contender(OURS, lambda: lambda x, weight: rms_norm(x, weight, EPS)),
            Contender(TORCH, lambda: plain),
            compiled(lambda: plain),
            *peers(
                device,
                ("liger_kernel", Contender("liger", _liger)),
                ("transformer_engine", Contender("transformer_engine", lambda: _transformer_engine(dtype))),
            ),
        ),
    )


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What a user without us calls."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS)


def _liger() -> Callable[..., torch.Tensor]:
    function: Any = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    # Offset 0, the rounding of Gemma's norm (all in fp32, as ours), and a gradient of its own, not in place of dy:
    # the same dy serves every call here.
    return lambda x, weight: function.apply(x, weight, EPS, 0.0, "gemma", False)


def _transformer_engine(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    module: Any = importlib.import_module("transformer_engine.pytorch")
    norms: dict[int, Any] = {}

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norm = norms.get(id(weight))
        if norm is None:
            # It owns its weight; ours in its place makes its gradient the one that is compared.
            norm = module.RMSNorm(x.shape[-1], eps=EPS, device=x.device, dtype=dtype)
            del norm.weight
            norm.weight = weight
            norms.clear()
            norms[id(weight)] = norm
        out: torch.Tensor = norm(x)
        return out

    return run
