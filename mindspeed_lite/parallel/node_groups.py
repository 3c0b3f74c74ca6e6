"""Groups of a process group's ranks within a node and between nodes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .groups import new_groups

# Group -> ranks of a node -> (intra-node, inter-node group); reused by the next session.
_MADE: weakref.WeakKeyDictionary[ProcessGroup, dict[int, tuple[ProcessGroup | None, ProcessGroup]]] = (
    weakref.WeakKeyDictionary()
)


def ranks_per_node(ranks: Sequence[int], node_size: int) -> int:
    """Ranks per node; ranks: global, in group order.

    Raises:
        ValueError: a single node, or unequal or non-adjacent ranks per node.
    """
    nodes = [rank // node_size for rank in ranks]
    count = nodes.count(nodes[0])
    if count == len(nodes):
        raise ValueError(f"all {len(ranks)} ranks are on one node of {node_size}")
    firsts = nodes[::count]
    if len(nodes) % count or len({*firsts}) < len(firsts) or nodes != [node for node in firsts for _ in range(count)]:
        raise ValueError(f"the ranks {', '.join(map(str, ranks))} are not equally many on each node of {node_size}")
    return count


class NodeGroups:
    """Intra-node and inter-node groups, created once per `group`. A collective."""

    def __init__(self, group: ProcessGroup, node_size: int) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.group, self.rank = group, dist.get_rank(group)
        self.ranks = ranks_per_node(ranks, node_size)
        self.nodes = len(ranks) // self.ranks
        node, place = divmod(self.rank, self.ranks)
        made = _MADE.setdefault(group, {})
        if self.ranks not in made:
            mates, peers = ranks[node * self.ranks : (node + 1) * self.ranks], ranks[place :: self.ranks]
            *within, between = new_groups(group, *([mates] if len(mates) > 1 else []), peers)
            made[self.ranks] = within[0] if within else None, between
        self.within, self.between = made[self.ranks]
