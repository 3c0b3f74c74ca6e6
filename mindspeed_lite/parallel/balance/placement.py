"""Expert placement for equal load, and choice of hot experts to copy.

A placement is each expert's rank. Experts keep their local slot, so moves exchange equal pieces. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Minimum relative reduction of the largest predicted load.
MIN_GAIN = 0.02


class SlotMove(NamedTuple):
    """Exchange within one local slot.

    to: [ranks], destination of each rank's expert.
    source: [ranks], sender of the next expert.
    """

    slot: int
    to: tuple[int, ...]
    source: tuple[int, ...]


def contiguous(experts: int, ranks: int) -> list[int]:
    """Megatron's placement: adjacent experts on a rank. Raises ValueError if ranks do not divide them."""
    if ranks < 1 or experts % ranks:
        raise ValueError(f"{ranks} ranks cannot hold {experts} experts in equal numbers")
    return [expert * ranks // experts for expert in range(experts)]


def rank_loads(loads: Sequence[float], placement: Sequence[int], ranks: int) -> list[float]:
    found = [0.0] * ranks
    for load, rank in zip(loads, placement, strict=True):
        found[rank] += load
    return found


def greedy(loads: Sequence[float], ranks: int) -> list[int]:
    """Slot by slot, the heaviest expert on the least loaded rank, then `improved`."""
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
    """Exchange the fullest rank's experts within their slot, while the larger sum falls."""
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
    """Keep groups; each goes to the rank that holds most of it."""
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
    """Best placement, or `before` if none pays; price: tokens per step to gain per moved slot."""

    def cost(placement: Sequence[int]) -> tuple[float, int]:
        moves = len(slot_moves(placement, before, ranks))
        return max(rank_loads(loads, placement, ranks)) + price * moves, moved(placement, before)

    best = min(improved(loads, before, ranks), relabelled(greedy(loads, ranks), before, ranks), key=cost)
    return best if cost(best)[0] < (1 - MIN_GAIN) * cost(before)[0] else list(before)


def moved(placement: Sequence[int], before: Sequence[int]) -> int:
    return sum(new != old for new, old in zip(placement, before, strict=True))


def slot_moves(after: Sequence[int], before: Sequence[int], ranks: int) -> list[SlotMove]:
    found = []
    for number, slot in enumerate(_slots(len(after), ranks)):
        to, source = [0] * ranks, [0] * ranks
        for expert in slot:
            to[before[expert]], source[after[expert]] = after[expert], before[expert]
        if to != [*range(ranks)]:
            found.append(SlotMove(number, tuple(to), tuple(source)))
    return found


def experts_at(placement: Sequence[int], ranks: int) -> list[int]:
    """Invert a placement: expert indices by rank, then local slot, [experts]."""
    local = len(placement) // ranks
    found = [0] * len(placement)
    for expert, rank in enumerate(placement):
        found[rank * local + expert % local] = expert
    return found


def _slots(experts: int, ranks: int) -> list[list[int]]:
    local = len(contiguous(experts, ranks)) // ranks
    return [list(range(slot, experts, local)) for slot in range(local)]


@dataclass(frozen=True)
class SentTokens:
    """Tokens sent to experts in an expert-parallel group.

    totals: [experts]. by_source: expert -> [ranks], tokens by source rank.
    """

    totals: Sequence[float]
    by_source: Callable[[int], Sequence[float]]
    ranks: int

    @classmethod
    def counted(cls, counts: Sequence[Sequence[float]]) -> SentTokens:
        totals = [sum(column) for column in zip(*counts, strict=True)]
        return cls(totals, lambda expert: [row[expert] for row in counts], len(counts))

    @classmethod
    def evenly(cls, loads: Sequence[float], ranks: int) -> SentTokens:
        return cls(loads, lambda expert: [loads[expert] / ranks] * ranks, ranks)


def loads_with_copies(sent: SentTokens, placement: Sequence[int], copied: Collection[int]) -> list[float]:
    """[ranks]; tokens of a copied expert stay on their source."""
    found = rank_loads(sent.totals, placement, sent.ranks)
    for expert in copied:
        found[placement[expert]] -= sent.totals[expert]
        found = [load + here for load, here in zip(found, sent.by_source(expert), strict=True)]
    return found


def hot_experts(sent: SentTokens, placement: Sequence[int], number: int, price: float = 0.0) -> list[int]:
    """At most `number` experts to copy: repeatedly the heaviest of the fullest rank.

    Returns the prefix with the lowest maximum load, if each saves more than `price`.
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
