"""Computes the cross-entropy of a vocabulary that is split over a group, rank by rank in order.

Each rank looks at its own shard; three values per row travel, in one all-gather, and
every rank merges the same values in the same order. So the losses are equal on all ranks to the last bit. Nothing
travels in the backward pass but what the linear layer before it sends.
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
    """`mindspeed_lite.ops.cross_entropy.cross_entropy`, where a rank of `group` has logits [..., V / size].

    target: [...], the same on every rank; `group` is None where a rank has the whole vocabulary.
    """
    start, size, gather = _place(logits.shape[-1], group)
    return cross_entropy(logits, target, start, size, gather)


def vocab_parallel_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None,
    accumulate: Accumulate | None = None,
) -> torch.Tensor:
    """`mindspeed_lite.ops.linear_cross_entropy.linear_cross_entropy`, where a rank has weight [V / size, H].

    hidden: [..., H], the same on every rank. Its gradient is that of this rank's shard of the vocabulary: to sum it
    over the ranks is left to the caller, who gave each of them the hidden states.
    """
    start, size, gather = _place(weight.shape[0], group)
    return linear_cross_entropy(hidden, weight, target, start, size, gather, accumulate)


def _place(width: int, group: dist.ProcessGroup | None) -> tuple[int, int, Gather | None]:
    """Where a shard of this width begins, the size of the whole, and how to get the statistics of all shards."""
    if group is None or group.size() == 1:
        return 0, width, None
    return group.rank() * width, group.size() * width, functools.partial(_gather, group=group)


def _gather(statistics: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = statistics.new_empty((group.size() * statistics.shape[0], statistics.shape[1]))
    dist.all_gather_into_tensor(parts, statistics.contiguous(), group=group)
    return parts.view(group.size(), *statistics.shape)
