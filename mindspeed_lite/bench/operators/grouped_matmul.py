"""grouped_matmul: against a loop over the experts' linear layers, and PyTorch's grouped product.

Tokens choose their experts with very different odds, so that groups are uneven; one expert has no rows. Every expert
has a weight of its own: PyTorch's product wants one tensor of all, and joining them is part of its time. Counted as
bytes: forward reads input and weights and writes the output; backward reads those and the output's gradient and
writes the gradients. As operations: those of the products.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name
from mindspeed_lite.ops.grouped_matmul import grouped_matmul


def shapes(device: str, quick: bool) -> list[str]:
    """Layers of many small experts and of few large ones; on accelerators those of Qwen3-30B-A3B and Mixtral 8x7B."""
    if quick:
        return ["1024x256x128x8"]
    if device == "cpu":
        return ["12288x512x256x64", "2048x1024x1408x8"]
    return ["65536x2048x1536x128", "16384x4096x28672x8"]


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `ROWSxINPUTxOUTPUTxEXPERTS`."""
    match = re.fullmatch("[xX]".join([r"([1-9]\d*)"] * 4), text)
    if match is None:
        raise ValueError("want ROWSxINPUTxOUTPUTxEXPERTS with all at least 1, for example 4096x512x256x16")
    rows, k, n, experts = (int(part) for part in match.groups())
    counts = _uneven(rows, experts)

    def make() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        made = [torch.randn(rows, k, generator=generator)]
        made += [torch.randn(n, k, generator=generator) * k**-0.5 for _ in range(experts)]
        return tuple(each.to(device, dtype).requires_grad_() for each in made)

    size, product = dtype.itemsize, 2 * rows * n * k
    forward = Work((rows * (n + k) + experts * n * k) * size, product)
    backward = Work((rows * (n + 2 * k) + 2 * experts * n * k) * size, 2 * product)
    return Case(
        operator="grouped_matmul",
        name=f"{rows}x{k}x{n}x{experts} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=forward,
        both=Work(forward.bytes + backward.bytes, forward.flops + backward.flops),
        contenders=(
            Contender(OURS, lambda: lambda x, *weights: grouped_matmul(x, weights, counts)),
            Contender(TORCH, lambda: lambda x, *weights: plain(x, weights, counts)),
            compiled(lambda: lambda x, *weights: plain(x, weights, counts)),
            # It has no float64.
            *([] if dtype == torch.float64 else [Contender("torch grouped_mm", lambda: _grouped_mm(counts, device))]),
        ),
    )


def plain(x: torch.Tensor, weights: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """What a user without us has."""
    parts = zip(torch.split(x, list(counts)), weights, strict=True)
    return torch.cat([torch.nn.functional.linear(rows, weight) for rows, weight in parts])


def _grouped_mm(counts: Sequence[int], device: str) -> Callable[..., torch.Tensor]:
    product: Callable[..., torch.Tensor] = torch.nn.functional.grouped_mm  # type: ignore[attr-defined, unused-ignore]
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=device)
    return lambda x, *weights: product(x, torch.stack(weights).transpose(1, 2), offs=ends)


def _uneven(rows: int, experts: int) -> list[int]:
    """Rows of every expert, the last of which has none (unless it is the only one)."""
    if experts == 1:
        return [rows]
    generator = torch.Generator().manual_seed(2)
    odds = torch.randn(experts - 1, generator=generator).softmax(0)
    chosen = torch.multinomial(odds, rows, replacement=True, generator=generator)
    return [*chosen.bincount(minlength=experts - 1).tolist(), 0]
