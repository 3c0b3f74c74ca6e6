"""Simulates the gain of ordering micro-batches by attention cost. Standard library only."""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from .lengths import attention_pairs, balanced_order

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")


@dataclass(frozen=True)
class GeneratedLengths:
    """Document lengths from a Pareto distribution.

    shortest, longest: tokens; longer documents are cut.
    tail: exponent; smaller means more long documents.
    """

    shortest: int = 16
    tail: float = 1.4
    longest: int = 8192
    seed: int = 1234

    def draw(self) -> Iterator[int]:
        chance = random.Random(self.seed)
        while True:
            yield min(self.longest, int(self.shortest * chance.paretovariate(self.tail)))


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


def lower_bound(costs: Sequence[float], ranks: int) -> float:
    """Least slowest rank: the mean, or the most expensive unit with the cheapest others."""
    each = len(costs) // ranks
    ordered = sorted(costs)
    return max(sum(costs) / ranks, ordered[-1] + sum(ordered[: each - 1]))


@dataclass(frozen=True)
class LengthOutcome:
    """Cost of the slowest rank over the mean.

    name: "in order", "balanced", "balanced for waits" (experts over several ranks) or "lower bound".
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


def simulate(costs: Sequence[int], ranks: int, step: int, micro_batch: int = 1) -> list[LengthOutcome]:
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
    bound = sum(lower_bound(units, ranks) for units in steps)
    # Sorting minimises the sum of the groups' maxima.
    waited = sum(sum(sorted(units, reverse=True)[::ranks]) for units in steps)
    return [*outcomes, LengthOutcome("lower bound", bound / even, waited / even)]
