"""Vocabulary-parallel cross-entropy.

One all-gather of three values per row, merged in the same order: bitwise equal losses on all ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_lite.ops.cross_entropy import Gather, cross_entropy
from mindspeed_lite.ops.linear_cross_entropy import Accumulate, linear_cross_entropy
from mindspeed_lite.ops.linear_log_prob import linear_log_prob


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor, group: ProcessGroup | None) -> Tensor:
    """Loss from logits [..., V / size] and target [...]; group: None for the whole vocabulary."""
    start, size, gather = _place(logits.shape[-1], group)
    return cross_entropy(logits, target, start, size, gather)


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, group: ProcessGroup | None, accumulate: Accumulate | None = None
) -> Tensor:
    """Loss from weight [V / size, H] and hidden [..., H]; the caller sums hidden's gradient over the ranks."""
    start, size, gather = _place(weight.shape[0], group)
    return linear_cross_entropy(hidden, weight, target, start, size, gather, accumulate)


def vocab_parallel_linear_log_prob(
    hidden: Tensor, weight: Tensor, target: Tensor, group: ProcessGroup | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Log-probability and entropy from weight [V / size, H] and hidden [..., H]; options of `linear_log_prob`.

    The caller sums hidden's gradient over the ranks.
    """
    start, size, gather = _place(weight.shape[0], group)
    return linear_log_prob(hidden, weight, target, vocab_start=start, vocab_size=size, gather=gather, **options)


def _place(width: int, group: ProcessGroup | None) -> tuple[int, int, Gather | None]:
    if group is None or group.size() == 1:
        return 0, width, None
    return group.rank() * width, group.size() * width, functools.partial(_gather, group=group)


def _gather(statistics: Tensor, group: ProcessGroup) -> Tensor:
    parts = statistics.new_empty((group.size() * statistics.shape[0], statistics.shape[1]))
    dist.all_gather_into_tensor(parts, statistics.contiguous(), group=group)
    return parts.view(group.size(), *statistics.shape)
