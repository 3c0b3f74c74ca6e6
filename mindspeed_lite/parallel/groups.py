"""Creates process groups of some ranks without the rest of the world."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def new_groups(group: dist.ProcessGroup, *rank_lists: Sequence[int]) -> list[dist.ProcessGroup]:
    """A new group for each list of global ranks that includes this rank; a collective of `group`.

    torch names such groups by ranks and a group count that repeats after groups are destroyed and differs between
        ranks: ranks hang or find stale addresses. Here the ranks agree on a unique name.
    """
    name: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, dist.get_global_rank(group, 0), group)
    made = []
    for number, ranks in enumerate(rank_lists):
        with _named(f"{name[0]}/{number}/{'_'.join(map(str, ranks))}"):
            made.append(dist.new_group(list(ranks), use_local_synchronization=True))
    return made


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Set the next group's name; torch has no argument for it."""
    torch_: Any = distributed_c10d
    own = torch_._process_group_name
    torch_._process_group_name = lambda ranks, use_hashed_name: name if use_hashed_name else own(ranks, False)
    try:
        yield
    finally:
        torch_._process_group_name = own
