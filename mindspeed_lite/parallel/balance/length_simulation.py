"""What ordering micro-batches by attention cost gains: documents read from an index or drawn, packed, and assigned.

Standard library alone.
"""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import lengths

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")


@dataclass(frozen=True)
class GeneratedLengths:
    """Lengths of made-up documents, by a Pareto distribution: few long ones hold many of the tokens.

    Attributes:
        shortest: tokens of the shortest document.
        tail: exponent; the smaller, the more tokens long documents hold.
        longest: tokens of the longest document; longer ones are cut.
        seed: of the draws.
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
    """The lengths of the documents of a data set, from the `.idx` file that Megatron's preprocessing wrote.

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
    """The lengths in another order again and again, without end."""
    chance, order = random.Random(seed), list(found)
    while True:
        chance.shuffle(order)
        yield from order


def sample_costs(documents: Iterator[int], sequence: int, samples: int, seed: int) -> list[int]:
    """[samples], the attention cost of samples that are filled with documents in turn, in a drawn order.

    A document that does not fit goes on in the next sample, as in Megatron's GPTDataset.
    """
    costs, left = [], 0
    for _ in range(samples):
        pieces, room = [], sequence
        while room:
            left = left or next(documents)
            pieces.append(min(left, room))
            left -= pieces[-1]
            room -= pieces[-1]
        costs.append(lengths.attention_pairs(pieces))
    random.Random(seed).shuffle(costs)
    return costs


@dataclass(frozen=True)
class LengthOutcome:
    """Attention cost over steps under one assignment, over that of equal ranks.

    Attributes:
        name: "in order", "balanced", "balanced for waits" (what experts over several ranks get) or "lower bound".
        step: the slowest rank of each step, where ranks wait for each other at its end.
        micro_batch: the slowest rank of each micro-batch, where they wait in each, as with expert parallelism.
    """

    name: str
    step: float
    micro_batch: float


_ORDERS: dict[str, Callable[[Sequence[int], int], list[int]]] = {
    "in order": lambda units, ranks: [*range(len(units))],
    "balanced": lengths.balanced_order,
    "balanced for waits": partial(lengths.balanced_order, waits=True),
}


def _groups(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def simulate(costs: Sequence[int], ranks: int, step: int, micro_batch: int = 1) -> list[LengthOutcome]:
    """Whole steps of `step` samples: in the order that they come in, balanced, and what no order is below.

    Samples of a drawn order are a random assignment as they come.

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
            slowest += max(lengths.rank_costs(units, order, ranks))
            waited += sum(max(units[each] for each in row) for row in _groups(order, ranks))
        outcomes.append(LengthOutcome(name, slowest / even, waited / even))
    bound = sum(lengths.lower_bound(units, ranks) for units in steps)
    # Units sorted and grouped have the least sum of largest ones.
    waited = sum(sum(sorted(units, reverse=True)[::ranks]) for units in steps)
    return [*outcomes, LengthOutcome("lower bound", bound / even, waited / even)]
