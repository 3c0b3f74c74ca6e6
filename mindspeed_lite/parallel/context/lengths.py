"""One error on every rank where ranks have sequences of different lengths."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

# Groups whose ranks have compared their lengths.
_compared: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class UnequalLengthsError(RuntimeError):
    """Ranks of one group have sequences of different lengths."""


def compare_lengths(q: torch.Tensor, k: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Check that the ranks of a group have as many rows, in batches of one size.

    On the CPU in every call; on a device, where reading the answer would hold it up, in a group's first call.

    Raises:
        UnequalLengthsError: they have not; the text names what each has.
    """
    if group.size() == 1 or (q.device.type != "cpu" and group in _compared):
        return
    own = (q.shape[0], k.shape[0], q.shape[1] if q.dim() == 4 else 1)
    everybody = torch.empty(group.size() * len(own), dtype=torch.int64, device=q.device)
    dist.all_gather_into_tensor(everybody, torch.tensor(own, dtype=torch.int64, device=q.device), group=group)
    found = [tuple(each) for each in everybody.view(-1, len(own)).tolist()]
    if len(set(found)) > 1:
        ranks = dist.get_process_group_ranks(group)
        says = ", ".join(
            f"rank {rank} {rows} (batch {batch})" for rank, (rows, _, batch) in zip(ranks, found, strict=True)
        )
        raise UnequalLengthsError(
            f"context parallelism: the ranks hold different numbers of rows of one sequence: {says}; give all ranks "
            "of a context-parallel group batches of one length."
        )
    _compared.add(group)
