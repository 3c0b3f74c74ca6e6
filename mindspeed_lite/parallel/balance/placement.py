"""Assigns experts to ranks so that ranks have equal load: as many experts a rank as before, at other places.

Loads are lists of numbers by expert; a placement is a list of the rank of each expert. Standard library alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

# Above it the exact assignment takes seconds.
MAX_EXACT_EXPERTS = 16


def contiguous(experts: int, ranks: int) -> list[int]:
    """Megatron's placement: neighbouring experts on a rank, in order.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    if ranks < 1 or experts % ranks:
        raise ValueError(f"{ranks} ranks cannot hold {experts} experts in equal numbers")
    return [expert * ranks // experts for expert in range(experts)]


def rank_loads(loads: Sequence[float], placement: Sequence[int], ranks: int) -> list[float]:
    """[ranks], the sum of the loads of the experts that each rank holds."""
    found = [0.0] * ranks
    for load, rank in zip(loads, placement, strict=True):
        found[rank] += load
    return found


def greedy(loads: Sequence[float], ranks: int) -> list[int]:
    """Places the heaviest expert first, each on the least loaded rank with room, then exchanges pairs while that helps.

    Source: longest processing time first (Graham, 1969), with a fixed number of experts a rank.
    """
    room = [len(contiguous(len(loads), ranks)) // ranks] * ranks
    sums = [0.0] * ranks
    placement = [0] * len(loads)
    for expert in sorted(range(len(loads)), key=lambda each: (-loads[each], each)):
        rank = min((each for each in range(ranks) if room[each]), key=lambda each: (sums[each], each))
        placement[expert] = rank
        room[rank] -= 1
        sums[rank] += loads[expert]
    _exchange(loads, placement, sums)
    return placement


def _exchange(loads: Sequence[float], placement: list[int], sums: list[float]) -> None:
    """Exchange an expert of the fullest rank with another rank's, while the larger of the two sums falls."""
    held: list[list[tuple[float, int]]] = [[] for _ in sums]
    for expert, rank in enumerate(placement):
        bisect.insort(held[rank], (loads[expert], expert))
    for _ in range(len(loads)):
        full = max(range(len(sums)), key=lambda each: sums[each])
        best = (sums[full] * (1 - 1e-9), (0.0, -1), (0.0, -1), full)
        for rank, others in enumerate(held):
            half = (sums[full] - sums[rank]) / 2
            for own in held[full] if half > 0 else ():
                # The partner that leaves the two ranks nearest to each other is one of two neighbours.
                near = bisect.bisect(others, (own[0] - half, 0))
                for other in others[max(0, near - 1) : near + 1]:
                    gain = own[0] - other[0]
                    best = min(best, (max(sums[full] - gain, sums[rank] + gain), own, other, rank))
        _, own, other, rank = best
        if rank == full:
            return
        gain = own[0] - other[0]
        sums[full] -= gain
        sums[rank] += gain
        held[full].remove(own)
        held[rank].remove(other)
        bisect.insort(held[full], other)
        bisect.insort(held[rank], own)
        placement[own[1]], placement[other[1]] = rank, full


def exact(loads: Sequence[float], ranks: int) -> list[int]:
    """The placement with the least largest sum, by branch and bound; for few experts.

    Raises:
        ValueError: more than `MAX_EXACT_EXPERTS`.
    """
    if len(loads) > MAX_EXACT_EXPERTS:
        raise ValueError(f"the exact placement takes up to {MAX_EXACT_EXPERTS} experts, not {len(loads)}")
    order = sorted(range(len(loads)), key=lambda each: -loads[each])
    best = greedy(loads, ranks)
    least = max(rank_loads(loads, best, ranks))
    lower = max(sum(loads) / ranks, max(loads, default=0.0))
    placement = [0] * len(loads)
    room = [len(loads) // ranks] * ranks
    sums = [0.0] * ranks

    def place(depth: int) -> None:
        nonlocal best, least
        if depth == len(order):
            best, least = list(placement), max(sums)
            return
        tried = set()
        for rank in range(ranks):
            # Ranks that are alike so far are interchangeable.
            state = (sums[rank], room[rank])
            if not room[rank] or state in tried or sums[rank] + loads[order[depth]] >= least:
                continue
            tried.add(state)
            placement[order[depth]] = rank
            sums[rank] += loads[order[depth]]
            room[rank] -= 1
            place(depth + 1)
            sums[rank], room[rank] = state
            if least <= lower:
                return

    place(0)
    return best


def relabelled(placement: Sequence[int], before: Sequence[int], ranks: int) -> list[int]:
    """The same groups of experts, named for the ranks that hold most of each already, so that fewer move."""
    shared = [[0] * ranks for _ in range(ranks)]
    for new, old in zip(placement, before, strict=True):
        shared[new][old] += 1
    pairs = sorted((-shared[new][old], new, old) for new in range(ranks) for old in range(ranks))
    name: dict[int, int] = {}
    for _, new, old in pairs:
        if new not in name and old not in name.values():
            name[new] = old
    return [name[rank] for rank in placement]


def moved(placement: Sequence[int], before: Sequence[int]) -> int:
    """How many experts change their rank."""
    return sum(new != old for new, old in zip(placement, before, strict=True))
