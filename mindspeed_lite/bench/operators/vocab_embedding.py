"""vocab_embedding: against an embedding with assignments to masked positions, as Megatron has it.

The slice is one of four, so that three ids of four are masked. Counted as bytes: forward reads a row for each id that
is here and writes one for each; backward reads the output's gradient and writes the weight's. No arithmetic worth the
name but the sums of the gradient.
"""

from __future__ import annotations

import re

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name
from mindspeed_lite.ops.vocab_embedding import vocab_embedding

SLICES = 4


def shapes(device: str, quick: bool) -> list[str]:
    """A rank's slice of vocabularies of 32k and 128k."""
    if quick:
        return ["256x256x1024"]
    return ["1024x1024x8192"] if device == "cpu" else ["8192x4096x8192", "8192x4096x32064"]


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `IDSxHIDDENxROWS`."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)[xX]([1-9]\d*)", text)
    if match is None:
        raise ValueError("want IDSxHIDDENxROWS, each at least 1, for example 1024x1024x8192")
    count, hidden, rows = (int(number) for number in match.groups())
    ids = torch.randint(0, SLICES * rows, (count,), generator=torch.Generator().manual_seed(2))

    def make() -> tuple[torch.Tensor, ...]:
        weight = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        return (weight.requires_grad_(),)

    def tokens(weight: torch.Tensor) -> torch.Tensor:
        nonlocal ids
        if ids.device != weight.device:
            ids = ids.to(weight.device)
        return ids

    def assigned(weight: torch.Tensor) -> torch.Tensor:
        """What Megatron writes."""
        mask = (tokens(weight) < rows) | (tokens(weight) >= 2 * rows)
        local = tokens(weight).clone() - rows
        local[mask] = 0
        out = torch.nn.functional.embedding(local, weight)
        out[mask, :] = 0.0
        return out

    size = dtype.itemsize
    forward = Work((count + count // SLICES) * hidden * size, 0)
    backward = Work((count + rows) * hidden * size, count * hidden)
    return Case(
        operator="vocab_embedding",
        name=f"{count}x{hidden}x{rows} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=forward,
        both=Work(forward.bytes + backward.bytes, backward.flops),
        contenders=(
            Contender(OURS, lambda: lambda weight: vocab_embedding(tokens(weight), weight, rows)),
            Contender(TORCH, lambda: assigned),
            compiled(lambda: assigned),
        ),
    )
