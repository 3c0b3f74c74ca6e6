"""Chooses experts that every rank gets a copy of for one micro-batch: their tokens stay on the rank they come from.

Standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from . import placement as placements


@dataclass(frozen=True)
class SentTokens:
    """Tokens that the ranks of an expert-parallel group send to experts.

    Attributes:
        totals: [experts], tokens of each expert.
        by_source: of an expert, [ranks], how many of its tokens come from each rank.
        ranks: how many there are.
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
        """Where sources are not known: each rank sends an equal part of an expert's tokens."""
        return cls(loads, lambda expert: [loads[expert] / ranks] * ranks, ranks)


def rank_loads(sent: SentTokens, placement: Sequence[int], copied: Collection[int]) -> list[float]:
    """[ranks], tokens that each rank computes; those of a copied expert on the rank that they come from.

    Args:
        placement: the rank of each expert.
        copied: experts that every rank has.
    """
    found = placements.rank_loads(sent.totals, placement, sent.ranks)
    for expert in copied:
        found[placement[expert]] -= sent.totals[expert]
        found = [load + here for load, here in zip(found, sent.by_source(expert), strict=True)]
    return found


def hot_experts(sent: SentTokens, placement: Sequence[int], number: int, price: float = 0.0) -> list[int]:
    """The experts to copy, at most `number`: one after the other the heaviest of the fullest rank.

    Of these as many are taken as lower the largest load most, each by more than its price. A copy may lower nothing
    until the next one is made, where two ranks are equally full.

    Args:
        price: tokens that a copy must take off the fullest rank to be worth it.
    """
    loads = rank_loads(sent, placement, ())
    if max(loads) - sum(loads) / sent.ranks <= price:
        return []
    chosen: list[int] = []
    best, count = max(loads), 0
    for _ in range(number):
        fullest = max(range(sent.ranks), key=lambda rank: loads[rank])
        candidates = [each for each, rank in enumerate(placement) if rank == fullest and each not in chosen]
        if not candidates:
            break
        heaviest = max(candidates, key=lambda each: sent.totals[each])
        loads = [load + here for load, here in zip(loads, sent.by_source(heaviest), strict=True)]
        loads[fullest] -= sent.totals[heaviest]
        chosen.append(heaviest)
        cost = max(loads) + price * len(chosen)
        if cost < best:
            best, count = cost, len(chosen)
    return chosen[:count]
