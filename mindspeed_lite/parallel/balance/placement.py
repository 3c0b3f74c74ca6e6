"""Assigns experts to ranks for equal load, and chooses hot experts that every rank gets a copy of.

A placement is the rank of each expert. An expert keeps its local slot, so that a move is an exchange of equal pieces.
Loads are tokens by expert. Standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A placement is taken if it lowers the largest predicted load by this share.
MIN_GAIN = 0.02


class SlotMove(NamedTuple):
    """An exchange of the experts in one local slot.

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
    """[ranks], the sum of the loads of each rank's experts."""
    found = [0.0] * ranks
    for load, rank in zip(loads, placement, strict=True):
        found[rank] += load
    return found


def greedy(loads: Sequence[float], ranks: int) -> list[int]:
    """Slot by slot the heaviest expert on the least loaded rank, then `improved`."""
    sums = [0.0] * ranks
    placement = [0] * len(loads)
    slots = _slots(len(loads), ranks)
    for slot in sorted(slots, key=lambda slot: min(loads[each] for each in slot) - max(loads[each] for each in slot)):
        emptiest = sorted(range(ranks), key=lambda rank: (sums[rank], rank))
        for expert, rank in zip(sorted(slot, key=lambda each: (-loads[each], each)), emptiest, strict=True):
            placement[expert] = rank
            sums[rank] += loads[expert]
    return improved(loads, placement, ranks)


def improved(loads: Sequence[float], before: Sequence[int], ranks: int) -> list[int]:
    """Exchange experts of the fullest rank with others' in the same slot, while the larger sum falls.

    Each exchange is the one after which the larger of the two is least, so few experts move.
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


def relabelled(placement: Sequence[int], before: Sequence[int], ranks: int) -> list[int]:
    """The same groups of experts, each on a rank that holds many of it already, so that fewer move."""
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
    """The placement for predicted loads, or `before` if no other pays.

    price: tokens of a step that the fullest rank must lose for each slot in which experts move.
    """

    def cost(placement: Sequence[int]) -> tuple[float, int]:
        moves = len(slot_moves(placement, before, ranks))
        return max(rank_loads(loads, placement, ranks)) + price * moves, moved(placement, before)

    best = min(improved(loads, before, ranks), relabelled(greedy(loads, ranks), before, ranks), key=cost)
    return best if cost(best)[0] < (1 - MIN_GAIN) * cost(before)[0] else list(before)


def moved(placement: Sequence[int], before: Sequence[int]) -> int:
    """Number of experts that change their rank."""
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
    """[experts], the expert at each place; places go rank by rank, in the order of slots."""
    local = len(placement) // ranks
    found = [0] * len(placement)
    for expert, rank in enumerate(placement):
        found[rank * local + expert % local] = expert
    return found


def _slots(experts: int, ranks: int) -> list[list[int]]:
    """[local experts][ranks], the experts that may change places with each other."""
    local = len(contiguous(experts, ranks)) // ranks
    return [list(range(slot, experts, local)) for slot in range(local)]


@dataclass(frozen=True)
class SentTokens:
    """Tokens that the ranks of an expert-parallel group send to experts.

    totals: [experts], tokens of each expert.
    by_source: expert -> [ranks], its tokens by the rank that they come from.
    """

    totals: Sequence[float]
    by_source: Callable[[int], Sequence[float]]
    ranks: int

    @classmethod
    def counted(cls, counts: Sequence[Sequence[float]]) -> SentTokens:
        """From counts [ranks][experts]."""
        totals = [sum(column) for column in zip(*counts, strict=True)]
        return cls(totals, lambda expert: [row[expert] for row in counts], len(counts))

    @classmethod
    def evenly(cls, loads: Sequence[float], ranks: int) -> SentTokens:
        """With each rank sending an equal part of an expert's tokens."""
        return cls(loads, lambda expert: [loads[expert] / ranks] * ranks, ranks)


def loads_with_copies(sent: SentTokens, placement: Sequence[int], copied: Collection[int]) -> list[float]:
    """[ranks], tokens that each rank computes; those of a copied expert stay on their source."""
    found = rank_loads(sent.totals, placement, sent.ranks)
    for expert in copied:
        found[placement[expert]] -= sent.totals[expert]
        found = [load + here for load, here in zip(found, sent.by_source(expert), strict=True)]
    return found


def hot_experts(sent: SentTokens, placement: Sequence[int], number: int, price: float = 0.0) -> list[int]:
    """The experts to copy, at most `number`: repeatedly the heaviest expert of the fullest rank.

    Of these, as many as lower the largest load most, each by more than `price`.
    """
    loads = rank_loads(sent.totals, placement, sent.ranks)
    if max(loads) - sum(loads) / sent.ranks <= price:
        return []
    copied: list[int] = []
    best, count = max(loads), 0
    for _ in range(number):
        fullest = max(range(sent.ranks), key=lambda rank: loads[rank])
        candidates = [each for each, rank in enumerate(placement) if rank == fullest and each not in copied]
        if not candidates:
            break
        heaviest = max(candidates, key=lambda each: sent.totals[each])
        loads = [load + here for load, here in zip(loads, sent.by_source(heaviest), strict=True)]
        loads[fullest] -= sent.totals[heaviest]
        copied.append(heaviest)
        cost = max(loads) + price * len(copied)
        if cost < best:
            best, count = cost, len(copied)
    return copied[:count]
