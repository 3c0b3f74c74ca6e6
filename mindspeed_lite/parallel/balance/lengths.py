"""Orders a step's micro-batches for equal attention cost on data-parallel ranks, and simulates the gain.

Attention cost is quadratic in document length. Only the ranks of micro-batches change.
"""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from .placement import improved

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
    placed, sums = [0] * len(costs), [0.0] * ranks
    for units in _groups(ordered, ranks):
        # The most expensive to the least loaded rank.
        for unit, rank in zip(units, sorted(range(ranks), key=lambda each: (sums[each], each)), strict=True):
            placed[unit] = rank
            sums[rank] += costs[unit]
    if not waits:
        placed = improved(costs, placed, ranks)
    held: list[list[int]] = [[] for _ in range(ranks)]
    for unit in ordered:
        held[placed[unit]].append(unit)
    return [unit for row in zip(*held, strict=True) for unit in row]


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


_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")


def read_index(path: str | Path) -> Sequence[int]:
    """Document lengths from Megatron's `.idx` file. Raises ValueError for other files, or OSError."""
    with Path(path).open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or _HEADER.unpack(head)[:2] != (_MAGIC, 1):
            raise ValueError(f"{path} is no index of a Megatron data set (.idx)")
        count = _HEADER.unpack(head)[3]
        # A corrupt count may exceed memory.
        held = min(count, (Path(path).stat().st_size - _HEADER.size) // 4)
        if held < count or not count:
            raise ValueError(f"{path} holds {held} lengths of {count} documents")
        found = array("i", file.read(4 * count))
    if min(found) < 0 or max(found) < 1:
        raise ValueError(f"{path} is damaged: its documents have {min(found)} to {max(found)} tokens")
    return found


def shuffled(found: Sequence[int], seed: int) -> Iterator[int]:
    chance, order = random.Random(seed), list(found)
    while True:
        chance.shuffle(order)
        yield from order


def sample_costs(documents: Iterator[int], sequence: int, samples: int, seed: int) -> list[int]:
    """[samples], attention cost of samples filled with shuffled documents.

    Documents continue in the next sample, as in Megatron's GPTDataset.
    """
    costs, left = [], 0
    for _ in range(samples):
        pieces, room = [], sequence
        while room:
            left = left or next(documents)
            pieces.append(min(left, room))
            left -= pieces[-1]
            room -= pieces[-1]
        costs.append(attention_pairs(pieces))
    random.Random(seed).shuffle(costs)
    return costs


def rank_costs(costs: Sequence[float], order: Sequence[int], ranks: int) -> list[float]:
    return [sum(costs[unit] for unit in islice(order, rank, None, ranks)) for rank in range(ranks)]


@dataclass(frozen=True)
class LengthOutcome:
    """Cost of the slowest rank over the mean.

    name: "in order", "balanced" or "balanced for waits" (experts over several ranks).
    step, micro_batch: where ranks synchronise; the latter with expert parallelism.
    """

    name: str
    step: float
    micro_batch: float


_ORDERS: dict[str, Callable[[Sequence[int], int], list[int]]] = {
    "in order": lambda units, ranks: [*range(len(units))],
    "balanced": balanced_order,
    "balanced for waits": partial(balanced_order, waits=True),
}


def _groups(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def simulate_order(costs: Sequence[int], ranks: int, step: int, micro_batch: int = 1) -> list[LengthOutcome]:
    """Outcomes over whole steps of `step` samples. Raises ValueError without equal micro-batches."""
    if step % (micro_batch * ranks):
        raise ValueError(f"{step} samples are no micro-batches of {micro_batch} for each of {ranks} ranks")
    steps = [
        [sum(each) for each in _groups(samples, micro_batch)]
        for samples in _groups(costs[: len(costs) // step * step], step)
    ]
    if not steps:
        raise ValueError(f"{len(costs)} samples are no step of {step}")
    even = sum(map(sum, steps)) / ranks
    outcomes = []
    for name, order_of in _ORDERS.items():
        slowest = waited = 0.0
        for units in steps:
            order = order_of(units, ranks)
            slowest += max(rank_costs(units, order, ranks))
            waited += sum(max(units[each] for each in row) for row in _groups(order, ranks))
        outcomes.append(LengthOutcome(name, slowest / even, waited / even))
    return outcomes
