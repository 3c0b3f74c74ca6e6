"""What ordering micro-batches by attention cost gains, for documents read or drawn.

Standard library alone.
"""

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
    """Lengths of documents drawn from a Pareto distribution: few long ones hold many of the tokens.

    shortest, longest: tokens; longer documents are cut.
    tail: exponent; the smaller, the more tokens long documents hold.
    """

    shortest: int = 16
    tail: float = 1.4
    longest: int = 8192
    seed: int = 1234

    def draw(self) -> Iterator[int]:
        """Lengths without end."""
        chance = random.Random(self.seed)
        while True:
            yield min(self.longest, int(self.shortest * chance.paretovariate(self.tail)))


def read_index(path: str | Path) -> Sequence[int]:
    """Lengths of the documents of a data set, from the `.idx` file of Megatron's preprocessing.

    Raises:
        ValueError: the file is no such index.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or _HEADER.unpack(head)[:2] != (_MAGIC, 1):
            raise ValueError(f"{path} is no index of a Megatron data set (.idx)")
        count = _HEADER.unpack(head)[3]
        # A damaged count may be more than memory holds.
        held = min(count, (Path(path).stat().st_size - _HEADER.size) // 4)
        if held < count or not count:
            raise ValueError(f"{path} holds {held} lengths of {count} documents")
        found = array("i", file.read(4 * count))
    if min(found) < 0 or max(found) < 1:
        raise ValueError(f"{path} is damaged: its documents have {min(found)} to {max(found)} tokens")
    return found


def shuffled(found: Sequence[int], seed: int) -> Iterator[int]:
    """The lengths, shuffled again and again, without end."""
    chance, order = random.Random(seed), list(found)
    while True:
        chance.shuffle(order)
        yield from order


def sample_costs(documents: Iterator[int], sequence: int, samples: int, seed: int) -> list[int]:
    """[samples], the attention cost of samples filled with documents in turn, in a shuffled order.

    A document that does not fit continues in the next sample, as in Megatron's GPTDataset.
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
    """[ranks], the sum of the costs of each rank's units."""
    return [sum(costs[unit] for unit in islice(order, rank, None, ranks)) for rank in range(ranks)]


def lower_bound(costs: Sequence[float], ranks: int) -> float:
    """The least cost of the slowest rank: the mean, or the most expensive unit with the cheapest others."""
    each = len(costs) // ranks
    ordered = sorted(costs)
    return max(sum(costs) / ranks, ordered[-1] + sum(ordered[: each - 1]))


@dataclass(frozen=True)
class LengthOutcome:
    """Attention cost of the slowest rank under one assignment, over that of equal ranks.

    name: "in order", "balanced", "balanced for waits" (for experts over several ranks) or "lower bound".
    step: ranks wait for each other at the end of a step.
    micro_batch: ranks wait in each micro-batch, as with expert parallelism.
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
    """The outcome of each assignment over whole steps of `step` samples, and the lower bound.

    Raises:
        ValueError: a step does not consist of equal numbers of micro-batches, or there is none.
    """
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
    # Units sorted and grouped have the least sum of largest ones.
    waited = sum(sum(sorted(units, reverse=True)[::ranks]) for units in steps)
    return [*outcomes, LengthOutcome("lower bound", bound / even, waited / even)]
