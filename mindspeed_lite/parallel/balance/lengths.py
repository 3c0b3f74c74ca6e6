"""Orders a step's micro-batches for equal attention cost on data-parallel ranks.

Attention cost is quadratic in document length. Only the ranks of micro-batches change. Standard library only.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence

# Loaders read ahead into the next step.
KEPT_STEPS = 4


def attention_pairs(lengths: Iterable[int]) -> int:
    """Causal query-key pairs within documents: n (n + 1) / 2 each."""
    return sum(each * (each + 1) // 2 for each in lengths)


def balanced_order(costs: Sequence[float], ranks: int, *, waits: bool = False) -> list[int]:
    """[units], the unit at each place; place p belongs to rank p mod ranks.

    waits: ranks synchronise in every micro-batch (expert parallelism): simultaneous units get similar costs. Otherwise
        rank sums are balanced, the most expensive units first. Raises ValueError if ranks do not divide the units.
    """
    if ranks < 1 or len(costs) % ranks:
        raise ValueError(f"{len(costs)} micro-batches are not equally many for each of {ranks} ranks")
    ordered = sorted(range(len(costs)), key=lambda each: (-costs[each], each))
    held: list[list[int]] = [[] for _ in range(ranks)]
    if waits:
        sums = [0.0] * ranks
        for start in range(0, len(ordered), ranks):
            least_first = sorted(range(ranks), key=lambda each: (sums[each], each))
            for rank, unit in zip(least_first, ordered[start : start + ranks], strict=True):
                held[rank].append(unit)
                sums[rank] += costs[unit]
    else:
        placed = _spread(costs, ordered, ranks)
        for unit in ordered:
            held[placed[unit]].append(unit)
    return [unit for row in zip(*held, strict=True) for unit in row]


def _spread(costs: Sequence[float], ordered: Sequence[int], ranks: int) -> list[int]:
    """[units], the rank of each: LPT (Graham, 1969) with equal counts, then pair exchanges."""
    room = [len(costs) // ranks] * ranks
    sums = [0.0] * ranks
    found = [0] * len(costs)
    for unit in ordered:
        rank = min((each for each in range(ranks) if room[each]), key=lambda each: (sums[each], each))
        found[unit] = rank
        room[rank] -= 1
        sums[rank] += costs[unit]
    _exchange(costs, found, sums)
    return found


def _exchange(costs: Sequence[float], found: list[int], sums: list[float]) -> None:
    """Exchange pairs with the fullest rank while the larger sum falls."""
    held: list[list[tuple[float, int]]] = [[] for _ in sums]
    for unit, rank in enumerate(found):
        bisect.insort(held[rank], (costs[unit], unit))
    for _ in range(len(costs)):
        full = max(range(len(sums)), key=lambda each: sums[each])
        best = (sums[full] * (1 - 1e-9), (0.0, -1), (0.0, -1), full)
        for rank, others in enumerate(held):
            half = (sums[full] - sums[rank]) / 2
            for own in held[full] if half > 0 else ():
                # The best partner is one of two neighbours.
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
        found[own[1]], found[other[1]] = rank, full


class StepOrder:
    """The sample at each place of a training, with each step's micro-batches reordered.

    As in Megatron's sampler, place i of a step belongs to micro-batch i // (micro_batch * ranks) of rank (i //
    micro_batch) mod ranks. Orders depend only on the step, so a training can resume. An incomplete last step keeps its
    order.

    first, total: first sample, samples of the data set.
    step, micro_batch: samples, the former over all ranks.
    cost_of: cost of a sample by its index.

    Raises:
        ValueError: a step has no equal numbers of micro-batches.
    """

    def __init__(
        self,
        first: int,
        total: int,
        step: int,
        micro_batch: int,
        ranks: int,
        cost_of: Callable[[int], float],
        *,
        waits: bool = False,
    ) -> None:
        if min(step, micro_batch, ranks) < 1 or step % (micro_batch * ranks):
            raise ValueError(f"{step} samples are no micro-batches of {micro_batch} for each of {ranks} ranks")
        self._first, self._total, self._step = first, total, step
        self._micro_batch, self._ranks, self._cost_of, self._waits = micro_batch, ranks, cost_of, waits
        self._orders: dict[int, list[int]] = {}

    def source(self, place: int) -> int:
        within = (place - self._first) % self._step
        start = place - within
        if start < self._first or start + self._step > self._total:
            return place
        unit, sample = divmod(within, self._micro_batch)
        return start + self._order(start)[unit] * self._micro_batch + sample

    def _order(self, start: int) -> list[int]:
        if start not in self._orders:
            size = self._micro_batch
            costs = [
                sum(self._cost_of(sample) for sample in range(first, first + size))
                for first in range(start, start + self._step, size)
            ]
            while len(self._orders) >= KEPT_STEPS:
                del self._orders[next(iter(self._orders))]
            self._orders[start] = balanced_order(costs, self._ranks, waits=self._waits)
        return self._orders[start]
