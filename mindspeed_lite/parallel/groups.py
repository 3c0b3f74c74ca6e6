"""Makes process groups of some ranks of another one, while the other ranks of the world do something else."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def new_groups(group: dist.ProcessGroup, *rank_lists: Sequence[int]) -> list[dist.ProcessGroup]:
    """A new group for each list, which this rank is in. A collective of `group`, whose ranks give as many lists.

    torch would name such a group by its ranks and by how many groups the process has. That number repeats when groups
    have ended, and differs between ranks that are in different groups: then ranks wait for each other, or meet the
    addresses of a group that was. Here the ranks agree on a name that no other group has.

    Args:
        rank_lists: global ranks.
    """
    told: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group)
    made = []
    for number, ranks in enumerate(rank_lists):
        with _named(f"{told[0]}/{number}/{'_'.join(map(str, ranks))}"):
            made.append(dist.new_group(list(ranks), use_local_synchronization=True))
    return made


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """The next group that some ranks make by themselves has this name: torch has no argument for it."""
    torch_: Any = distributed_c10d
    own = torch_._process_group_name
    torch_._process_group_name = lambda ranks, use_hashed_name: name if use_hashed_name else own(ranks, False)
    try:
        yield
    finally:
        torch_._process_group_name = own


__all__ = ["new_groups"]
