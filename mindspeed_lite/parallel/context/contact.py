"""What ends context parallelism between ranks: one of them is gone, or has a sequence of another length."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist

# What gloo, NCCL and HCCL say of a peer that ended or does not answer.
_SIGNS = ("connection", "broken pipe", "timed out", "timeout", "remote process", "gloo/transport", "nccl", "hccl")

# Groups whose ranks have compared their lengths.
_compared: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class LostRankError(RuntimeError):
    """A rank of the group has ended, or has not answered within the group's timeout."""


class UnequalLengthsError(RuntimeError):
    """Ranks of one group have sequences of different lengths."""


@contextlib.contextmanager
def contact(what: str) -> Iterator[None]:
    """Around messages of `what`: a peer that is lost raises LostRankError, with the same text on every rank."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if isinstance(error, LostRankError) or not any(sign in text for sign in _SIGNS):
            raise
        raise LostRankError(
            "context parallelism: another rank has ended or does not answer, so its part of the sequence does not "
            f"come ({what}); look for what that rank said last (a rank that is only slow needs a longer "
            "--distributed-timeout-minutes)."
        ) from error


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
    with contact("comparing lengths"):
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
