"""Reference of linear_cross_entropy."""

from __future__ import annotations

import torch

from mindspeed_lite.ops.cross_entropy import Gather
from mindspeed_lite.ops.cross_entropy import reference as cross_entropy
from mindspeed_lite.ops.linear_cross_entropy import chunks
from mindspeed_lite.ops.linear_cross_entropy.chunks import Accumulate

# 8 MiB of bf16.
CHUNK = 1 << 22


def definition(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy.definition(hidden @ weight.t(), target)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    vocab_start: int,
    vocab_size: int,
    gather: Gather | None,
    accumulate: Accumulate | None,
) -> torch.Tensor:
    given = (hidden, weight, target, vocab_start, vocab_size, gather, accumulate)
    return chunks.linear_cross_entropy(cross_entropy.KERNELS, CHUNK, *given)
