"""Counts the rows that an exchange of experts' tokens sends to each place: pure functions of the routing.

Rank r of a group is on node r // ranks, at place r % ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Splits(NamedTuple):
    """Rows sent to and received from each rank of a group."""

    sent: list[int]
    received: list[int]


class TwoLevels(NamedTuple):
    """What one rank sends and receives on both levels: rows of tokens, and pairs of a token and an expert.

    sources: (rank of the group, rows) in the order in which rows arrive on the inner level.
    """

    rows_between: Splits
    pairs_between: Splits
    rows_within: Splits
    pairs_within: Splits
    sources: list[tuple[int, int]]


def splits_of(table: Sequence[Sequence[int]], rank: int, ranks: int) -> TwoLevels:
    """Read off what rank `rank` of a group sends and receives.

    Args:
        table: for each rank of the group: rows for each rank, pairs for each rank, rows for each node.
        ranks: those of a node.
    """
    count = len(table)
    place = rank % ranks

    def rows_for_rank(source: int, to: int) -> int:
        return table[source][to]

    def pairs_for_rank(source: int, to: int) -> int:
        return table[source][count + to]

    def rows_for_node(source: int, node: int) -> int:
        return table[source][2 * count + node]

    def pairs_for_node(source: int, node: int) -> int:
        return sum(pairs_for_rank(source, to) for to in range(node * ranks, (node + 1) * ranks))

    def between(of: Callable[[int, int], int]) -> Splits:
        sent = [of(rank, node) for node in range(count // ranks)]
        return Splits(sent, [of(peer, rank // ranks) for peer in range(place, count, ranks)])

    def within(of: Callable[[int, int], int]) -> Splits:
        first = rank - place
        sent = [sum(of(peer, mate) for peer in range(place, count, ranks)) for mate in range(first, first + ranks)]
        return Splits(sent, [sum(of(source, rank) for source in range(each, count, ranks)) for each in range(ranks)])

    sources = [source for each in range(ranks) for source in range(each, count, ranks)]
    return TwoLevels(
        between(rows_for_node),
        between(pairs_for_node),
        within(rows_for_rank),
        within(pairs_for_rank),
        [(source, rows_for_rank(source, rank)) for source in sources],
    )


def rows_to(routing_map: torch.Tensor, places: int) -> list[int]:
    """Count the tokens that want an expert of each place.

    Args:
        routing_map: [T, E] bool; a place has E / places experts, in order.
    """
    tokens, experts = routing_map.shape
    wanted: list[int] = routing_map.reshape(tokens, places, experts // places).any(-1).sum(0).tolist()
    return wanted


def pairs_to(routing_map: torch.Tensor, places: int) -> list[int]:
    """Count the pairs of a token and an expert of each place: the rows of an exchange on one level."""
    tokens, experts = routing_map.shape
    pairs: list[int] = routing_map.reshape(tokens, places, experts // places).sum((0, 2)).tolist()
    return pairs


def expected_copies(experts: int, topk: int, places: int) -> float:
    """Mean number of places that hold one of a token's `topk` experts, if all choices are equally likely."""
    elsewhere = math.comb(experts - experts // places, topk) / math.comb(experts, topk)
    return places * (1 - elsewhere)


__all__ = ["Splits", "TwoLevels", "expected_copies", "pairs_to", "rows_to", "splits_of"]
