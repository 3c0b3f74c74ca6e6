"""linear_cross_entropy on CPU: cache-sized chunks, C++ kernels of cross_entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mindspeed_lite.ops import cross_entropy
from mindspeed_lite.ops.cross_entropy import Gather
from mindspeed_lite.ops.cross_entropy import cpu as passes
from mindspeed_lite.ops.linear_cross_entropy import chunks
from mindspeed_lite.ops.linear_cross_entropy.chunks import Accumulate

if TYPE_CHECKING:
    from mindspeed_lite.ops.linear_cross_entropy import Case

CHUNK = 1 << 22


def supported(case: Case) -> list[str]:
    return passes.supported(cross_entropy.Case(case.device, case.dtype))


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
    return chunks.linear_cross_entropy(passes.kernels(hidden), CHUNK, *given)
