"""Vocabulary-parallel cross-entropy.

One all-gather of three values per row, merged in the same order: bitwise equal losses on all ranks.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from mindspeed_lite.ops.cross_entropy import Gather, cross_entropy
from mindspeed_lite.ops.linear_cross_entropy import Accumulate, linear_cross_entropy


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Loss from logits [..., V / size] and target [...]; group: None for the whole vocabulary."""
    start, size, gather = _place(logits.shape[-1], group)
    return cross_entropy(logits, target, start, size, gather)


def vocab_parallel_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None,
    accumulate: Accumulate | None = None,
) -> torch.Tensor:
    """Loss from weight [V / size, H] and hidden [..., H]; the caller sums hidden's gradient over the ranks."""
    start, size, gather = _place(weight.shape[0], group)
    return linear_cross_entropy(hidden, weight, target, start, size, gather, accumulate)


def _place(width: int, group: dist.ProcessGroup | None) -> tuple[int, int, Gather | None]:
    if group is None or group.size() == 1:
        return 0, width, None
    return group.rank() * width, group.size() * width, functools.partial(_gather, group=group)


def _gather(statistics: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = statistics.new_empty((group.size() * statistics.shape[0], statistics.shape[1]))
    dist.all_gather_into_tensor(parts, statistics.contiguous(), group=group)
    return parts.view(group.size(), *statistics.shape)
