"""Expert placement for equal load, and choice of hot experts to copy.

A placement is each expert's rank. Experts keep their local slot, so moves exchange equal pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy

# [ranks][experts], tokens by source rank.
Counts = Sequence[Sequence[float]]

# Minimum relative reduction of the largest predicted load.
MIN_GAIN = 0.02
# Weight of the past in the average of loads.
DECAY = 0.9


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


def improved(
    loads: Sequence[float], before: Sequence[int], ranks: int, slots: Sequence[int] | None = None
) -> list[int]:
    """Exchange units, of one slot each, with the fullest rank while the larger of both sums falls."""
    load, placed = numpy.array(loads, dtype=float), numpy.array(before)
    slot = numpy.zeros(len(loads)) if slots is None else numpy.array(slots)
    for _ in loads:
        sums = numpy.bincount(placed, load, ranks)
        full = sums.argmax()
        own = numpy.flatnonzero(placed == full)
        gain = load[own, None] - load
        larger = numpy.maximum(sums[full] - gain, sums[placed] + gain)
        larger[(placed == full) | (slot[own, None] != slot)] = numpy.inf
        mine, other = numpy.unravel_index(larger.argmin(), larger.shape)
        if not larger[mine, other] < sums[full] * (1 - 1e-9):
            break
        placed[own[mine]], placed[other] = placed[other], full
    found: list[int] = placed.tolist()
    return found


def chosen(loads: Sequence[float], before: Sequence[int], ranks: int, price: float = 0.0) -> list[int]:
    """`improved` placement, or `before` if it does not pay; price: tokens per step to gain per moved slot."""
    local = len(loads) // ranks
    after = improved(loads, before, ranks, [expert % local for expert in range(len(loads))])
    cost = max(rank_loads(loads, after, ranks)) + price * len(slot_moves(after, before, ranks))
    return after if cost < (1 - MIN_GAIN) * max(rank_loads(loads, before, ranks)) else list(before)


def moved(placement: Sequence[int], before: Sequence[int]) -> int:
    return sum(new != old for new, old in zip(placement, before, strict=True))


def slot_moves(after: Sequence[int], before: Sequence[int], ranks: int) -> list[SlotMove]:
    found, local = [], len(after) // ranks
    for number in range(local):
        to, source = [0] * ranks, [0] * ranks
        for old, new in zip(before[number::local], after[number::local], strict=True):
            to[old], source[new] = new, old
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


def loads_with_copies(counts: Counts, placement: Sequence[int], copied: Sequence[int]) -> list[float]:
    """[ranks]; tokens of a copied expert stay on their source."""
    sent = numpy.array(counts, dtype=float)
    here = sent[:, list(copied)].sum(1)
    sent[:, list(copied)] = 0.0
    found: list[float] = (numpy.bincount(placement, sent.sum(0), len(sent)) + here).tolist()
    return found


def hot_experts(counts: Counts, placement: Sequence[int], number: int, price: float = 0.0) -> list[int]:
    """At most `number` experts to copy: repeatedly the heaviest of the fullest rank.

    Returns the prefix with the lowest maximum load, if each saves more than `price`.
    """
    sent, placed = numpy.array(counts, dtype=float), numpy.array(placement)
    totals = sent.sum(0)
    loads = numpy.bincount(placed, totals, len(sent))
    copied: list[int] = []
    best, count = loads.max(), 0
    if best - loads.mean() <= price:
        return []
    for _ in range(number):
        fullest = loads.argmax()
        candidates = [expert for expert in numpy.flatnonzero(placed == fullest).tolist() if expert not in copied]
        if not candidates:
            break
        heaviest = max(candidates, key=totals.__getitem__)
        loads = loads + sent[:, heaviest]
        loads[fullest] -= totals[heaviest]
        copied.append(heaviest)
        cost = loads.max() + price * len(copied)
        if cost < best * (1 - 1e-9):
            best, count = cost, len(copied)
    return copied[:count]
