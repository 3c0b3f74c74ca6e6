"""Assigns units of known cost to ranks, equally many to each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy


def deal(costs: Sequence[float], groups: Iterable[Sequence[int]], ranks: int) -> list[int]:
    """[units], the rank of each; of each group of `ranks` units the most expensive goes to the least loaded rank."""
    sums, found = [0.0] * ranks, [0] * len(costs)
    for group in groups:
        least_first = sorted(range(ranks), key=lambda rank: (sums[rank], rank))
        for unit, rank in zip(sorted(group, key=lambda each: (-costs[each], each)), least_first, strict=True):
            found[unit] = rank
            sums[rank] += costs[unit]
    return found


def exchange(
    costs: Sequence[float], before: Sequence[int], ranks: int, slots: Sequence[int] | None = None
) -> list[int]:
    """Exchange units with the fullest rank while the larger of both sums falls.

    slots: [units]; only units of one slot are exchanged.
    """
    cost, placed = numpy.array(costs, dtype=float), numpy.array(before)
    slot = numpy.zeros(len(costs)) if slots is None else numpy.array(slots)
    for _ in costs:
        sums = numpy.bincount(placed, cost, ranks)
        full = sums.argmax()
        own = numpy.flatnonzero(placed == full)
        gain = cost[own, None] - cost
        larger = numpy.maximum(sums[full] - gain, sums[placed] + gain)
        larger[(placed == full) | (slot[own, None] != slot)] = numpy.inf
        mine, other = numpy.unravel_index(larger.argmin(), larger.shape)
        if not larger[mine, other] < sums[full] * (1 - 1e-9):
            break
        placed[own[mine]], placed[other] = placed[other], full
    found: list[int] = placed.tolist()
    return found
