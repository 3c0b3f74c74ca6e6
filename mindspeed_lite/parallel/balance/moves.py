"""Moves the experts of one local slot among the ranks of a group: all tensors of each as bytes, in one exchange.

Every rank has the same tensors for a slot: parameters, main parameters or the shard of them that it updates, optimizer
states. What they hold is exchanged in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .placement import SlotMove


@torch.no_grad()
def exchange(tensors: Sequence[torch.Tensor], move: SlotMove, group: dist.ProcessGroup) -> int:
    """Send what the tensors hold to one rank and receive another's, in place. A collective of the group.

    Args:
        tensors: of this rank's expert in the slot; in number, shapes and dtypes the same on every rank.
        move: where each rank's expert goes.
        group: the ranks that experts are divided among.

    Returns:
        Bytes that this rank sent.
    """
    rank = group.rank()
    stays = move.to[rank] == rank
    # Wide elements first: so each tensor's bytes begin at a multiple of its element size.
    some = [] if stays else sorted(tensors, key=lambda each: -each.element_size())
    parts = [each.detach().reshape(-1).view(torch.uint8) for each in some]
    sent = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(
        received,
        sent,
        [0 if stays or each != move.source[rank] else len(sent) for each in range(group.size())],
        [0 if stays or each != move.to[rank] else len(sent) for each in range(group.size())],
        group=group,
    )
    for each, part in zip(some, torch.split(received, [len(part) for part in parts]), strict=True):
        each.copy_(part.view(each.dtype).view(each.shape))
    return len(sent)
