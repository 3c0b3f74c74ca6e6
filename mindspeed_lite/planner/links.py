"""Measured links between ranks: the file of `mindspeed-lite links`, seconds of messages, and orders of ranks.

A message takes as long as on the slowest ring of its kind of groups, each as fast as its slowest link.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median, quantiles
from typing import get_args

from mindspeed_lite import json_file

from .training import ArgumentError
from .work import Collective, CollectiveCall, Group

FORMAT = 1
_MOST_RANKS = 1 << 20
_NOISE = 1.25
# Time of an order that is worth proposing, over that of the one before.
_GAIN = 0.8
# Times as fast as others.
_FAST = 1.5
Message = tuple[Collective, Group]


@dataclass(frozen=True)
class MeasuredGroup:
    """All groups of a kind at once; bytes_per_second: of what each rank sends, in the slowest."""

    kind: Collective
    size: int
    stride: int
    bytes_per_second: float


@dataclass(frozen=True)
class Links:
    """Measured links.

    Attributes:
        hosts: host of each rank.
        bandwidth: bytes/s from a rank (row) to another; the diagonal is not read. latency: seconds, likewise.
        compute: seconds of the same matrix product on each rank.
        groups: of the layout that was measured.
        order: proposed; the rank at each place.
        seconds: a step's communication in the order of the measurement and in `order`; empty without a layout.
    """

    hosts: Sequence[str]
    bandwidth: Sequence[Sequence[float]]
    latency: Sequence[Sequence[float]]
    compute: Sequence[float]
    groups: Sequence[MeasuredGroup] = ()
    order: Sequence[int] = ()
    seconds: Sequence[float] = ()
    format: int = FORMAT

    def __post_init__(self) -> None:
        ranks = len(self.hosts)
        for name in ("bandwidth", "latency"):
            if [len(row) for row in getattr(self, name)] != [ranks] * ranks:
                raise ValueError(f"{name} is no matrix of {ranks} ranks, which hosts has")
        if any(min((*row[:rank], *row[rank + 1 :]), default=1) < 1 for rank, row in enumerate(self.bandwidth)):
            raise ValueError("bandwidth has a link of less than 1 byte/s")
        if self.order and sorted(self.order) != [*range(ranks)]:
            raise ValueError(f"order does not hold each of the ranks 0 to {ranks - 1} once")
        if len(self.seconds) not in (0, 2):
            raise ValueError("seconds is not a list of 2")

    @cached_property
    def ranks_per_host(self) -> int:
        """Adjacent ranks of each host; 1 where hosts have unequally many, or others between them."""
        count = self.hosts.count(self.hosts[0])
        blocks = [self.hosts[at : at + count] for at in range(0, len(self.hosts), count)]
        is_even = len(self.hosts) == count * len({*self.hosts}) and all(len({*each}) == 1 for each in blocks)
        return count if is_even else 1

    def message(self, call: CollectiveCall) -> float:
        """Seconds of a call by all its groups at once, the measured ones where there are."""
        group = call.group
        if group.size == 1:
            return 0.0
        hops = 1 if call.kind == "send" else math.sqrt(group.size - 1) * (2 if call.kind == "all_reduce" else 1)
        key = call.kind, group
        if key not in self._priced:
            pairs = [pair for ring in self._rings(group) for pair in itertools.pairwise(ring)]
            self._priced[key] = max((self.latency[i][j] for i, j in pairs), default=0.0), self.rate(*key)
        latency, rate = self._priced[key]
        return latency * hops + sent(call) / rate

    def rate(self, kind: Collective, group: Group) -> float:
        """Bytes/s that a rank of the slowest group sends."""
        for each in self.groups:
            if (each.kind, each.size, each.stride) == (kind, group.size, group.stride):
                return each.bytes_per_second
        return min(self.rates(kind, group, range(len(self.hosts))), default=math.inf)

    def rates(self, kind: Collective, group: Group, order: Sequence[int]) -> list[float]:
        """Bytes/s of each group, with ranks in this order."""
        link = self.bandwidth
        if kind == "all_to_all":
            return [
                min(
                    (len(ring) - 1) / sum(1 / link[order[i]][order[j]] for j in ring if j != i) for i in ring
                )
                for ring in self._rings(group)
            ]  # fmt: skip
        ends = 0 if kind == "send" and group.stages else 1
        found = []
        for ring in self._rings(group):
            inside = sum(self.hosts[order[each]] == self.hosts[order[ring[0]]] for each in ring)
            rates = []
            for i, j in itertools.pairwise((*ring, *ring[:ends])):
                # Between hosts, a ring uses the adapters of all its ranks on a host.
                adapters = 1 if kind == "send" or self.hosts[order[i]] == self.hosts[order[j]] else inside
                rates.append(link[order[i]][order[j]] * adapters)
            found.append(min(rates))
        return found

    def _rings(self, group: Group) -> Iterator[Sequence[int]]:
        size, stride, ranks = group.stages or group.size, group.stride, len(self.hosts)
        for first in range(ranks):
            last = first + (size - 1) * stride
            if first // stride % size == 0 and last < ranks:
                yield range(first, last + 1, stride)

    @cached_property
    def _priced(self) -> dict[Message, tuple[float, float]]:
        """Latency and bytes/s."""
        return {}


def sent(call: CollectiveCall) -> float:
    """Bytes that a rank sends."""
    if call.kind == "send":
        return call.bytes
    return call.bytes * (call.group.size - 1) / call.group.size * (2 if call.kind == "all_reduce" else 1)


def read(file: str, ranks: int = 0, flag: str = "--links") -> Links:
    """Links of `ranks` ranks, 0: of any number. Raises ArgumentError."""
    matrix = json_file.rows(json_file.rows(json_file.number("a number", 0)))
    group = json_file.fields(
        {
            "kind": json_file.one_of(*get_args(Collective)),
            "size": json_file.whole("ranks", 1, _MOST_RANKS),
            "stride": json_file.whole("ranks", 1, _MOST_RANKS),
            "bytes_per_second": json_file.number("a bandwidth", 1),
        },
        make=MeasuredGroup,
    )
    description = json_file.fields(
        {
            "format": json_file.one_of(FORMAT),
            "hosts": json_file.rows(json_file.text("a host"), 1),
            "bandwidth": matrix,
            "latency": matrix,
            "compute": json_file.rows(json_file.number("seconds", 0)),
            "order": json_file.rows(json_file.whole("a rank", 0, _MOST_RANKS)),
        },
        {"groups": json_file.rows(group), "seconds": json_file.rows(json_file.number("seconds", 0))},
        others=True,
        make=Links,
    )
    try:
        found: Links = json_file.read(file, description)
    except json_file.JsonFileError as error:
        raise ArgumentError(f"{flag} {error}") from None
    if ranks not in (0, len(found.hosts)):
        raise ArgumentError(
            f"{flag} {file}: it has {len(found.hosts)} ranks, and the training {ranks}: measure the links of these"
        )
    return found


def communication(links: Links, traffic: Mapping[Message, float], order: Sequence[int]) -> float:
    """Seconds of a step's messages with ranks in this order, one after the other."""
    total = 0.0
    for (kind, group), count in traffic.items():
        own, changed = (min(links.rates(kind, group, each)) for each in (range(len(links.hosts)), order))
        total += count / links.rate(kind, group) * own / changed
    return total


def fast_block(links: Links) -> int:
    """Adjacent ranks that have much faster links among themselves than to others; 1 if none have."""
    ranks = len(links.hosts)
    ratios = {}
    for size in [each for each in range(2, ranks) if ranks % each == 0]:
        sides: tuple[list[float], list[float]] = ([], [])
        for i, j in itertools.permutations(range(ranks), 2):
            sides[i // size != j // size].append(links.bandwidth[i][j])
        ratios[size] = quantiles(sides[0], n=10)[0] / median(sides[1]) if len(sides[0]) > 1 else 0.0
    fast = [size for size, ratio in ratios.items() if ratio >= max(_FAST, 0.7 * max(ratios.values()))]
    return max(fast, default=1)


def propose(links: Links, traffic: Mapping[Message, float], seconds: float = 10.0) -> list[int]:
    """An order of ranks in which messages take least: swaps of hosts, and of ranks of a host, from several starts.

    traffic: bytes that a rank sends in a step. seconds: of the search, for many ranks.
    """
    # Links that differ by noise are alike.
    alike = [[_NOISE ** round(math.log(max(each, 1.0), _NOISE)) for each in row] for row in links.bandwidth]
    rounded = replace(links, bandwidth=alike)
    size, ranks = links.ranks_per_host, len(links.hosts)
    blocks = [[*range(at, at + size)] for at in range(0, ranks, size)]
    end = time.monotonic() + seconds

    def cost(order: Sequence[int], links: Links = rounded) -> float:
        total = 0.0
        for (kind, group), count in traffic.items():
            rates = links.rates(kind, group, order)
            # The mean leads over plateaus of the slowest group.
            total += count * (1 / min(rates) + 1e-3 * fmean(1 / each for each in rates)) if rates else 0.0
        return total

    swaps = [(i, j, size) for i, j in itertools.combinations(range(0, ranks, size), 2)]
    swaps += [(i, j, 1) for at in range(0, ranks, size) for i, j in itertools.combinations(range(at, at + size), 2)]
    chance = random.Random(0)
    starts = [blocks, *(chance.sample(blocks, len(blocks)) for _ in range(8))]
    best = [*range(ranks)]
    least = cost(best, links)
    for start in starts:
        order = [each for block in start for each in block]
        current, tried = cost(order), 0
        for i, j, width in itertools.cycle(swaps):
            if tried == len(swaps) or time.monotonic() > end:
                break
            tried += 1
            changed = [*order]
            changed[i : i + width], changed[j : j + width] = order[j : j + width], order[i : i + width]
            if (value := cost(changed)) < current * (1 - 1e-9):
                order, current, tried = changed, value, 0
        if (exact := cost(order, links)) < _GAIN * least:
            best, least = order, exact
    return best
