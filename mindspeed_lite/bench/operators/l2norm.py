"""l2norm: against Megatron's own: a norm for each tensor, and the norm of these on the host.

The tensors are the gradients of a model of the case's dtype, which the optimizer has in fp32 (a model's fp32 and its
16 bits have the same case then; float64 stays itself). Counted as bytes: every tensor is read. Counted as operations on
each element: a product and a sum.
"""

from __future__ import annotations

import re

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name
from mindspeed_lite.ops.l2norm import l2norm


def shapes(device: str, quick: bool) -> list[str]:
    """A few matrices, many small ones, and a layer or two of a large model."""
    if quick:
        return ["8x65536"]
    return ["256x4096", "8x1048576", "4x16777216"] + ([] if device == "cpu" else ["16x67108864"])


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `TENSORSxELEMENTS`."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", text)
    if match is None:
        raise ValueError("want TENSORSxELEMENTS with both at least 1, for example 8x1048576")
    count, size = int(match[1]), int(match[2])
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def make() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        return tuple(torch.randn(size, generator=generator).to(device, wide) for _ in range(count))

    return Case(
        operator="l2norm",
        name=f"{count}x{size} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=Work(count * size * wide.itemsize, 2 * count * size),
        both=None,
        contenders=(
            Contender(OURS, lambda: lambda *tensors: l2norm(tensors)),
            Contender(TORCH, lambda: plain),
            compiled(lambda: plain),
        ),
    )


def plain(*tensors: torch.Tensor) -> torch.Tensor:
    """What a user without us calls, apart from the way over the host; summed in the dtype that ours is summed in."""
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    norms = [torch.linalg.vector_norm(each, dtype=wide) for each in tensors]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
