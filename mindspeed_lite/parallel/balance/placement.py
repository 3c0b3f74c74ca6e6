"""Assigns experts to ranks so that ranks have equal load: as many experts a rank as before, at other places.

An expert keeps its local slot: slot j of one rank changes places with slot j of another. So the parameters, gradients
and optimizer states of all ranks stay laid out alike, and a move is an exchange of equal pieces.

Loads are lists of numbers by expert; a placement is a list of the rank of each expert. Standard library alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

# Above it the exact assignment takes seconds.
MAX_EXACT_EXPERTS = 16
# A placement is taken where it lowers the largest predicted load by this share.
MIN_GAIN = 0.02


class SlotMove(NamedTuple):
    """What becomes of the experts in one local slot.

    Attributes:
        slot: number of the experts on their ranks.
        to: [ranks], the rank that a rank's expert goes to; its own where it stays.
        source: [ranks], the rank that a rank gets its next expert from.
    """

    slot: int
    to: tuple[int, ...]
    source: tuple[int, ...]


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
    """Slot by slot the heaviest expert on the least loaded rank, then exchanges of pairs while they help.

    Slots of unequal experts come first. No two ranks differ by more than the experts of one slot do, so the fullest
    rank has at most (ranks - 1) / ranks of the widest slot's difference above the mean.
    """
    slots = _slots(len(loads), ranks)
    sums = [0.0] * ranks
    placement = [0] * len(loads)
    for slot in sorted(slots, key=lambda slot: min(loads[each] for each in slot) - max(loads[each] for each in slot)):
        emptiest = sorted(range(ranks), key=lambda rank: (sums[rank], rank))
        for expert, rank in zip(sorted(slot, key=lambda each: (-loads[each], each)), emptiest, strict=True):
            placement[expert] = rank
            sums[rank] += loads[expert]
    return improved(loads, placement, ranks)


def improved(loads: Sequence[float], before: Sequence[int], ranks: int) -> list[int]:
    """Exchanges an expert of the fullest rank with another rank's in its slot, while the larger of the two sums falls.

    Few experts move: each exchange is the one after which the two are least full.
    """
    placement, local = list(before), len(loads) // ranks
    sums = rank_loads(loads, before, ranks)
    held = [[0] * local for _ in range(ranks)]
    for expert, rank in enumerate(before):
        held[rank][expert % local] = expert
    for _ in range(len(loads)):
        full = max(range(ranks), key=lambda each: sums[each])
        best, exchange = sums[full] * (1 - 1e-9), None
        for rank, others in enumerate(held):
            for own, other in zip(held[full], others, strict=True):
                gain = loads[own] - loads[other]
                fuller = max(sums[full] - gain, sums[rank] + gain)
                if rank != full and fuller < best:
                    best, exchange = fuller, (own, other, rank)
        if exchange is None:
            break
        own, other, rank = exchange
        gain = loads[own] - loads[other]
        sums[full] -= gain
        sums[rank] += gain
        held[full][own % local], held[rank][own % local] = other, own
        placement[own], placement[other] = rank, full
    return placement


def exact(loads: Sequence[float], ranks: int) -> list[int]:
    """The placement with the least largest sum, by branch and bound over the orders of each slot; for few experts.

    Raises:
        ValueError: more than `MAX_EXACT_EXPERTS`.
    """
    if len(loads) > MAX_EXACT_EXPERTS:
        raise ValueError(f"the exact placement takes up to {MAX_EXACT_EXPERTS} experts, not {len(loads)}")
    slots = _slots(len(loads), ranks)
    best = greedy(loads, ranks)
    least = max(rank_loads(loads, best, ranks))
    placement = [0] * len(loads)
    # Ranks are interchangeable: the experts of the first slot stay.
    orders = [[tuple(range(ranks))]] + [[*itertools.permutations(range(ranks))]] * (len(slots) - 1)

    def place(depth: int, sums: Sequence[float]) -> None:
        nonlocal best, least
        if depth == len(slots):
            best, least = list(placement), max(sums)
            return
        for order in orders[depth]:
            after = list(sums)
            for expert, rank in zip(slots[depth], order, strict=True):
                after[rank] += loads[expert]
            if max(after) < least:
                for expert, rank in zip(slots[depth], order, strict=True):
                    placement[expert] = rank
                place(depth + 1, after)

    place(0, [0.0] * ranks)
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


def chosen(loads: Sequence[float], before: Sequence[int], ranks: int, price: float = 0.0) -> list[int]:
    """The placement for predicted loads: the one before where no other pays.

    Args:
        loads: predicted tokens of each expert in a step.
        price: tokens of a step that the fullest rank must lose for each slot in which experts move, which all ranks
            exchange at the same time.
    """

    def cost(placement: Sequence[int]) -> tuple[float, int]:
        moves = len(slot_moves(placement, before, ranks))
        return max(rank_loads(loads, placement, ranks)) + price * moves, moved(placement, before)

    best = min(improved(loads, before, ranks), relabelled(greedy(loads, ranks), before, ranks), key=cost)
    return best if cost(best)[0] < (1 - MIN_GAIN) * cost(before)[0] else list(before)


def moved(placement: Sequence[int], before: Sequence[int]) -> int:
    """How many experts change their rank."""
    return sum(new != old for new, old in zip(placement, before, strict=True))


def slot_moves(after: Sequence[int], before: Sequence[int], ranks: int) -> list[SlotMove]:
    """The slots in which experts change their rank."""
    found = []
    for number, slot in enumerate(_slots(len(after), ranks)):
        to, source = [0] * ranks, [0] * ranks
        for expert in slot:
            to[before[expert]], source[after[expert]] = after[expert], before[expert]
        if to != [*range(ranks)]:
            found.append(SlotMove(number, tuple(to), tuple(source)))
    return found


def experts_at(placement: Sequence[int], ranks: int) -> list[int]:
    """[experts], the expert at each place; a rank's places are neighbours, in the order of its slots."""
    local = len(placement) // ranks
    found = [0] * len(placement)
    for expert, rank in enumerate(placement):
        found[rank * local + expert % local] = expert
    return found


def _slots(experts: int, ranks: int) -> list[list[int]]:
    """[local experts][ranks], the experts that may change places with each other."""
    local = len(contiguous(experts, ranks)) // ranks
    return [list(range(slot, experts, local)) for slot in range(local)]
