"""Hierarchical expert exchange: one token copy per node, then one per rank inside it.

    copy to nodes -> all-to-all between nodes -> copy to ranks -> all-to-all within the node -> copy to experts

Results return by the same path, summed in fp32 on each rank and node: one row per token and node crosses the network.
    `spread` and `collect` are each other's gradient. Probabilities travel by (token, expert) pair.

Source: node-limited dispatch of DeepSeek-V3 (arXiv 2412.19437, section 3.2.2).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_lite.ops import permute as ops
from mindspeed_lite.ops.autograd import linear_map
from mindspeed_lite.ops.permute import rows as row_ids

from ..node_groups import NodeGroups
from .exchange import AllToAll


class TwoLevels(NamedTuple):
    """Exchanges of one rank's rows and (token, expert) pairs, between and within nodes.

    sources: (rank of the group, rows) in arrival order.
    """

    rows_between: AllToAll
    pairs_between: AllToAll
    rows_within: AllToAll
    pairs_within: AllToAll
    sources: list[tuple[int, int]]


def _exchanges(table: Tensor, nodes: NodeGroups) -> TwoLevels:
    """Split sizes of both levels; table (CPU), for each rank: rows and pairs by rank, rows by node."""
    count, rank, ranks = len(table), nodes.rank, nodes.ranks
    node, place = divmod(rank, ranks)
    mates = slice(node * ranks, (node + 1) * ranks)
    rows, pairs, rows_of_node = table[:, :count], table[:, count : 2 * count], table[:, 2 * count :]

    def between(to_node: Tensor) -> AllToAll:
        return AllToAll(to_node[place::ranks, node].tolist(), to_node[rank].tolist(), nodes.between)

    def within(to_rank: Tensor) -> AllToAll:
        received = to_rank[:, rank].view(-1, ranks).sum(0)
        return AllToAll(received.tolist(), to_rank[place::ranks, mates].sum(0).tolist(), nodes.within)

    sources = torch.arange(count).view(-1, ranks).t().flatten().tolist()
    return TwoLevels(
        between(rows_of_node),
        between(pairs.view(count, -1, ranks).sum(-1)),
        within(rows),
        within(pairs),
        [(source, int(rows[source, rank])) for source in sources],
    )


@dataclass(frozen=True)
class RowCopies:
    """Row copies: copy i is of row index[i] (int32) of `rows` rows."""

    index: Tensor
    rows: int

    @functools.cached_property
    def _row_ids(self) -> Tensor:
        return row_ids.of_pairs(self.index, self.rows, 1)

    def spread(self, x: Tensor) -> Tensor:
        """[rows, ...] -> [copies, ...]."""
        return x.index_select(0, self.index)

    def collect(self, y: Tensor) -> Tensor:
        """[copies, H] -> [rows, H], summed in fp32; [copies] -> [rows] if each has at most one copy."""
        if y.dim() == 1:
            return y.new_zeros(self.rows).index_copy_(0, self.index.long(), y)
        return ops.unpermute(y, self._row_ids, (self.rows, y.shape[1]))


class Path(NamedTuple):
    """Path to experts; `spread` starts after `to_nodes`, `collect` ends there."""

    to_nodes: RowCopies
    between: AllToAll
    to_ranks: RowCopies
    within: AllToAll
    to_experts: RowCopies

    def spread(self, x: Tensor) -> Tensor:
        """Send rows to their experts' ranks in two hops; sorted by source, expert and token."""
        arrived = self.between.run(x)
        arrived = self.within.run(self.to_ranks.spread(arrived))
        return self.to_experts.spread(arrived)

    def collect(self, y: Tensor) -> Tensor:
        """Rows of local experts -> rows of nodes, in y's dtype; intra-node sums and messages are fp32."""
        partial = self.to_experts.collect(y.to(torch.promote_types(y.dtype, torch.float32)))
        partial = self.to_ranks.collect(self.within.reversed().run(partial))
        return self.between.reversed().run(partial.to(y.dtype))


class Route(NamedTuple):
    """Paths of tokens [T, H] and of probabilities [T * E]."""

    tokens: Path
    probs: Path


def route_of(routing_map: Tensor, nodes: NodeGroups) -> Route:
    """Paths of tokens; routing_map: [T, E] bool, any T. A collective."""
    tokens, experts = routing_map.shape
    ranks, each = nodes.nodes * nodes.ranks, experts // (nodes.nodes * nodes.ranks)
    counts = _counts(routing_map.reshape(tokens, ranks, each), nodes.nodes)
    table = counts.new_empty(ranks * len(counts))
    dist.all_gather_into_tensor(table, counts, group=nodes.group)
    exchanges = _exchanges(table.view(ranks, -1).cpu(), nodes)

    numbers = torch.arange(tokens * experts, dtype=torch.int32, device=routing_map.device).view(tokens, experts)
    level = _level(routing_map, numbers, nodes.nodes, tokens * experts)
    wanted = exchanges.rows_between.run(level.wanted.to(torch.uint8)).bool()

    inner = _level(wanted, _numbers(wanted), nodes.ranks, sum(exchanges.pairs_between.received or ()))
    wanted = exchanges.rows_within.run(inner.wanted.to(torch.uint8)).bool()

    expert, row = wanted.t().nonzero(as_tuple=True)
    source = torch.tensor([source for source, _ in exchanges.sources], device=wanted.device)
    rows = torch.tensor([count for _, count in exchanges.sources], device=wanted.device)
    order = source.repeat_interleave(rows)[row].argsort(stable=True)
    pairs = _numbers(wanted)[row[order], expert[order]]
    return Route(
        Path(
            level.rows,
            exchanges.rows_between,
            inner.rows,
            exchanges.rows_within,
            RowCopies(row[order].int(), len(wanted)),
        ),
        Path(
            level.pairs,
            exchanges.pairs_between,
            inner.pairs,
            exchanges.pairs_within,
            RowCopies(pairs, sum(exchanges.pairs_within.received or ())),
        ),
    )


def padded_map(routing_map: Tensor, capacity: int) -> Tensor:
    """Pad routing_map [T, E] with zero-probability tokens to `capacity` per expert."""
    by_expert = routing_map.t()
    token = by_expert.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :capacity]
    return torch.zeros_like(by_expert).scatter_(1, token, True).t()


def _counts(by_rank: Tensor, nodes: int) -> Tensor:
    """[T, ranks, E / ranks] -> rows for each rank, pairs for each rank, rows for each node."""
    needs = by_rank.any(-1)
    to_node = needs.view(len(needs), nodes, needs.shape[1] // nodes).any(-1)
    return torch.cat([needs.sum(0), by_rank.sum((0, 2)), to_node.sum(0)])


class _Level(NamedTuple):
    rows: RowCopies
    pairs: RowCopies
    # [sent rows, experts of a place].
    wanted: Tensor


def _level(wanted: Tensor, numbers: Tensor, places: int, pairs: int) -> _Level:
    shape = (len(wanted), places, wanted.shape[1] // places)
    by_place = wanted.reshape(shape).transpose(0, 1)
    needs = by_place.any(-1)
    row = needs.nonzero(as_tuple=True)[1]
    return _Level(
        RowCopies(row.int(), len(wanted)),
        RowCopies(numbers.view(shape).transpose(0, 1)[by_place], pairs),
        by_place[needs],
    )


def _numbers(wanted: Tensor) -> Tensor:
    return (wanted.flatten().cumsum(0, dtype=torch.int32) - 1).view(wanted.shape)


def spread(x: Tensor, way: RowCopies | Path) -> Tensor:
    """Rows to experts, differentiable; saves only indices."""
    return linear_map(x, way.spread, way.collect)


def collect(y: Tensor, way: RowCopies | Path) -> Tensor:
    """Results to tokens, differentiable; saves only indices."""
    return linear_map(y, way.collect, way.spread)
