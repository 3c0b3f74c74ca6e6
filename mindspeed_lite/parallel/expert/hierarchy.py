"""Exchanges experts' tokens on two levels: one copy of a token to each node, and inside the node one to each rank.

    copy to nodes -> all-to-all between nodes -> copy to ranks -> all-to-all within the node -> copy to experts

Peers between nodes are the ranks of the same place on each node. Results come back on the same way: a rank adds up its
experts' rows of a token, a node its ranks' rows, both in fp32; one row for each token and node crosses the network
again, and its source adds up the nodes. `spread` brings rows to experts, `collect` results to tokens; each is the
other's gradient. Probabilities take the same way without copies, for a pair of a token and an expert is on one rank.

Source: node-limited dispatch of DeepSeek-V3 (arXiv 2412.19437, section 3.2.2).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from mindspeed_lite.ops import permute as ops
from mindspeed_lite.ops.autograd import linear_map
from mindspeed_lite.ops.permute import rows as row_ids

from ..groups import new_groups
from .traffic import Splits, splits_of

# By group and ranks of a node: the groups within a node and between nodes. They are not ended, and serve the next
# session over the same group.
_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[dist.ProcessGroup | None, dist.ProcessGroup]]] = (
    weakref.WeakKeyDictionary()
)


def ranks_per_node(ranks: Sequence[int], node_size: int) -> int:
    """How many of a group's ranks each node has, where every node has as many and they are adjacent.

    Args:
        ranks: global ranks in the order of the group; node n holds node_size * n and those that follow.

    Raises ValueError with the reason where two levels make no sense or do not fit.
    """
    nodes = [rank // node_size for rank in ranks]
    count = nodes.count(nodes[0])
    if count == len(nodes):
        raise ValueError(f"all {len(ranks)} ranks that share the experts are on one node of {node_size}")
    firsts = nodes[::count]
    if len(nodes) % count or len({*firsts}) < len(firsts) or nodes != [node for node in firsts for _ in range(count)]:
        raise ValueError(
            f"the ranks that share the experts ({', '.join(map(str, ranks))}) are not equally many on each node of "
            f"{node_size}"
        )
    return count


class NodeGroups:
    """The ranks that share experts, by node: this rank's peers on other nodes and its mates on its own.

    Made by all ranks of `group` together, once for as long as that lives.

    Raises ValueError as `ranks_per_node`.
    """

    def __init__(self, group: dist.ProcessGroup, node_size: int) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.group, self.rank = group, dist.get_rank(group)
        self.ranks = ranks_per_node(ranks, node_size)
        self.nodes = len(ranks) // self.ranks
        node, place = divmod(self.rank, self.ranks)
        made = _MADE.setdefault(group, {})
        if self.ranks not in made:
            mates, peers = ranks[node * self.ranks : (node + 1) * self.ranks], ranks[place :: self.ranks]
            # There are two nodes at least, and one rank of a node sends nothing within it.
            *within, between = new_groups(group, *([mates] if len(mates) > 1 else []), peers)
            made[self.ranks] = within[0] if within else None, between
        self.within, self.between = made[self.ranks]


class Exchange(NamedTuple):
    """An all-to-all of rows there and back; the group is None where a rank is alone."""

    group: dist.ProcessGroup | None
    splits: Splits

    def send(self, x: torch.Tensor) -> torch.Tensor:
        return _all_to_all(x, self.group, self.splits.received, self.splits.sent)

    def send_back(self, x: torch.Tensor) -> torch.Tensor:
        return _all_to_all(x, self.group, self.splits.sent, self.splits.received)


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup | None, received: list[int], sent: list[int]) -> torch.Tensor:
    if group is None:
        return x
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


@dataclass(frozen=True)
class RowCopies:
    """Copies of rows: copy i is of row index[i] (int32) of `rows`."""

    index: torch.Tensor
    rows: int

    @functools.cached_property
    def _row_ids(self) -> torch.Tensor:
        return row_ids.of_pairs(self.index, self.rows, 1)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [copies, ...]."""
        return x.index_select(0, self.index)

    def collect(self, y: torch.Tensor) -> torch.Tensor:
        """[copies, H] -> [rows, H]: sums over each row's copies, in fp32, rounded once.

        [copies] -> [rows], of which each has one copy at most.
        """
        if y.dim() == 1:
            return y.new_zeros(self.rows).index_copy_(0, self.index.long(), y)
        return ops.unpermute(y, self._row_ids, (self.rows, y.shape[1]))


class Path(NamedTuple):
    """The way of rows to experts: `spread` begins behind `to_nodes`, and `collect` ends there."""

    to_nodes: RowCopies
    between: Exchange
    to_ranks: RowCopies
    within: Exchange
    to_experts: RowCopies

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Rows for nodes -> rows for this rank's experts, by source, then expert, then token."""
        arrived = self.between.send(x)
        arrived = self.within.send(self.to_ranks.spread(arrived))
        return self.to_experts.spread(arrived)

    def collect(self, y: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's experts -> rows of nodes, in y's dtype; sums and messages within a node are in fp32."""
        partial = self.to_experts.collect(y.to(torch.promote_types(y.dtype, torch.float32)))
        partial = self.to_ranks.collect(self.within.send_back(partial))
        return self.between.send_back(partial.to(y.dtype))


class Route(NamedTuple):
    """Ways of a batch's tokens [T, H] and of their probabilities [T * E]."""

    tokens: Path
    probs: Path


def route_of(routing_map: torch.Tensor, nodes: NodeGroups) -> Route:
    """Find the ways of this rank's tokens, with all ranks of the group: three small messages.

    Args:
        routing_map: [T, E] bool, True where the expert takes the token; T may differ between ranks and be 0. A rank of
            the group has E / ranks experts, in order.
    """
    tokens, experts = routing_map.shape
    ranks, each = nodes.nodes * nodes.ranks, experts // (nodes.nodes * nodes.ranks)
    counts = _counts(routing_map.reshape(tokens, ranks, each), nodes.nodes)
    table = counts.new_empty(ranks * len(counts))
    dist.all_gather_into_tensor(table, counts, group=nodes.group)
    splits = splits_of(table.view(ranks, -1).tolist(), nodes.rank, nodes.ranks)

    numbers = torch.arange(tokens * experts, dtype=torch.int32, device=routing_map.device).view(tokens, experts)
    level = _level(routing_map, numbers, nodes.nodes, tokens * experts)
    between = Exchange(nodes.between, splits.rows_between)
    wanted = _unpacked(between.send(_packed(level.wanted)), experts // nodes.nodes)

    inner = _level(wanted, _numbers(wanted), nodes.ranks, sum(splits.pairs_between.received))
    within = Exchange(nodes.within, splits.rows_within)
    wanted = _unpacked(within.send(_packed(inner.wanted)), each)

    expert, row = wanted.t().nonzero(as_tuple=True)
    source = torch.tensor([source for source, _ in splits.sources], device=wanted.device)
    rows = torch.tensor([count for _, count in splits.sources], device=wanted.device)
    order = source.repeat_interleave(rows)[row].argsort(stable=True)
    pairs = _numbers(wanted)[row[order], expert[order]]
    return Route(
        Path(level.rows, between, inner.rows, within, RowCopies(row[order].int(), len(wanted))),
        Path(
            level.pairs,
            Exchange(nodes.between, splits.pairs_between),
            inner.pairs,
            Exchange(nodes.within, splits.pairs_within),
            RowCopies(pairs, sum(splits.pairs_within.received)),
        ),
    )


def padded_map(routing_map: torch.Tensor, capacity: int) -> torch.Tensor:
    """[T, E] where each expert has `capacity` tokens: its first ones, then its first others, whose probability is 0."""
    by_expert = routing_map.t()
    token = by_expert.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :capacity]
    return torch.zeros_like(by_expert).scatter_(1, token, True).t()


def _counts(by_rank: torch.Tensor, nodes: int) -> torch.Tensor:
    """[T, ranks, E / ranks] -> rows for each rank, pairs for each rank, rows for each node."""
    needs = by_rank.any(-1)
    to_node = needs.view(len(needs), nodes, needs.shape[1] // nodes).any(-1)
    return torch.cat([needs.sum(0), by_rank.sum((0, 2)), to_node.sum(0)])


class _Level(NamedTuple):
    rows: RowCopies
    pairs: RowCopies
    # [rows that leave, experts of a place]: which experts there each is for.
    wanted: torch.Tensor


def _level(wanted: torch.Tensor, numbers: torch.Tensor, places: int, pairs: int) -> _Level:
    """Rows that want experts of `places`, and the pairs with their numbers, place by place."""
    shape = (len(wanted), places, wanted.shape[1] // places)
    by_place = wanted.reshape(shape).transpose(0, 1)
    needs = by_place.any(-1)
    row = needs.nonzero(as_tuple=True)[1]
    return _Level(
        RowCopies(row.int(), len(wanted)),
        RowCopies(numbers.view(shape).transpose(0, 1)[by_place], pairs),
        by_place[needs],
    )


def _numbers(wanted: torch.Tensor) -> torch.Tensor:
    """[R, E] -> where each pair is among those of all rows, row by row."""
    return (wanted.flatten().cumsum(0, dtype=torch.int32) - 1).view(wanted.shape)


def _packed(flags: torch.Tensor) -> torch.Tensor:
    """[R, n] bool -> [R, ceil(n / 8)] uint8."""
    bits = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.shape[1] % 8))
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (bits.view(len(flags), bits.shape[1] // 8, 8) * weights).sum(-1, dtype=torch.uint8)


def _unpacked(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of `_packed`."""
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(-1) & weights).bool()
    return bits.view(len(packed), packed.shape[1] * 8)[:, :count]


def spread(x: torch.Tensor, way: RowCopies | Path) -> torch.Tensor:
    """Rows to experts, differentiable: the gradient of a row is the sum over its copies. Keeps indices alone."""
    return linear_map(x, way.spread, way.collect)


def collect(y: torch.Tensor, way: RowCopies | Path) -> torch.Tensor:
    """Results to tokens, differentiable: the gradient of a copy is that of its row. Keeps indices alone."""
    return linear_map(y, way.collect, way.spread)


__all__ = ["RowCopies", "NodeGroups", "Path", "Route", "collect", "padded_map", "ranks_per_node", "route_of", "spread"]
