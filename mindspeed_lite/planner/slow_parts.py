"""Names slow hosts, ranks, links and stragglers in measured links, against the spread of the others.

A host or rank is slow where its links to all others are; a link is, where both its ends have faster ones. Links within
hosts are judged among themselves, and so are links between hosts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from .links import Links

Pair = tuple[int, int]
# Ranks, or hosts by name.
Members = tuple[int | str, ...]
# Times as slow as others, at least.
_BANDWIDTH, _LATENCY, _COMPUTE = 1.5, 3.0, 1.2
# Standard deviations of noise; of many single pairs some exceed them.
_DEVIATIONS, _ALONE = 5, 1.5


@dataclass(frozen=True)
class SlowPart:
    """kind: host, rank, link or straggler. names: hosts or ranks. factor: times as slow as others, in `what`."""

    kind: str
    names: tuple[str, ...]
    what: str
    factor: float

    @property
    def text(self) -> str:
        name = {"link": "slow link between", "straggler": "straggler"}.get(self.kind, f"slow {self.kind}")
        return f"{name} {' and '.join(self.names)}: {self.factor:.1f} times the others' time ({self.what})"


def slow_parts(links: Links) -> list[SlowPart]:
    """The slowest first."""
    found: dict[tuple[str, Members], tuple[str, float]] = {}
    seconds = {
        "bandwidth": ([[1 / each if each else 0.0 for each in row] for row in links.bandwidth], _BANDWIDTH),
        "latency": (links.latency, _LATENCY),
    }
    for what, (cells, least) in seconds.items():
        between = _of_cells(cells, links.hosts, True, least)
        # What is slow to other hosts may be so within its own.
        explained = {_host(each, links.hosts) for kind, members, _ in between if kind != "link" for each in members}
        within = _of_cells(cells, links.hosts, False, least)
        within = [each for each in within if not {_host(member, links.hosts) for member in each[1]} & explained]
        for kind, members, factor in (*between, *within):
            found.setdefault((kind, members), (what, factor))
    logs = [math.log(max(each, 1e-12)) for each in links.compute]
    limit = max(math.log(_COMPUTE), _DEVIATIONS * _spread(logs))
    for rank, each in enumerate(logs):
        if (excess := each - median(logs)) > limit:
            found["straggler", (rank,)] = "computation", math.exp(excess)
    parts = [
        SlowPart(kind, tuple(_name(each, links.hosts) for each in members), what, factor)
        for (kind, members), (what, factor) in found.items()
    ]
    return sorted(parts, key=lambda each: -each.factor)


def _of_cells(
    cells: Sequence[Sequence[float]], hosts: Sequence[str], is_between: bool, least: float
) -> list[tuple[str, Members, float]]:
    """Slow parts by seconds of pairs of ranks, as (kind, members, times as slow)."""
    slow = {
        (i, j): math.log(max(cells[i][j], cells[j][i], 1e-12))
        for i in range(len(hosts))
        for j in range(i)
        if (hosts[i] != hosts[j]) == is_between
    }
    # By rank and where its peers are: the median of a host's ranks, or a rank.
    towards: dict[int, dict[object, list[float]]] = {}
    for pair, value in slow.items():
        for own, peer in (pair, pair[::-1]):
            towards.setdefault(own, {}).setdefault(hosts[peer] if is_between else peer, []).append(value)
    levels = {rank: min(map(median, peers.values())) for rank, peers in towards.items()}
    if len(levels) < 3:
        return []  # nothing to compare with
    usual = median(levels.values())
    excess = {(i, j): value - max(levels[i], levels[j], usual) for (i, j), value in slow.items()}
    limit = max(math.log(least), _DEVIATIONS * _spread(excess.values()))
    found: list[tuple[str, Members, float]] = []
    explained: set[Pair] = set()
    ranks = {rank: level - usual for rank, level in levels.items() if level - usual > limit}
    for host in dict.fromkeys(hosts):
        members = [rank for rank, each in enumerate(hosts) if each == host and rank in levels]
        if members and all(rank in ranks for rank in members):
            found.append(("host", (host,), median(ranks.pop(rank) for rank in members)))
    found += [("rank", (rank,), value) for rank, value in ranks.items()]
    names = {name: place for place, name in enumerate(dict.fromkeys(hosts))}
    blocks: dict[tuple[str, ...], dict[Pair, float]] = {}
    for (i, j), value in excess.items():
        block = tuple(sorted((hosts[i], hosts[j]), key=names.__getitem__))
        blocks.setdefault(block, {})[i, j] = value - median(excess.values())
    for block, pairs in blocks.items():
        if is_between and (value := median(pairs.values())) > limit:
            found.append(("link", block, value))
            explained.update(pairs)
        found += [
            ("link", (j, i), value)
            for (i, j), value in pairs.items()
            if value > _ALONE * limit and (i, j) not in explained
        ]
    return [(kind, members, math.exp(value)) for kind, members, value in found]


def _spread(values: Iterable[float]) -> float:
    """Standard deviation of a normal distribution, by the median absolute deviation."""
    found = [*values]
    return 1.4826 * median(abs(each - median(found)) for each in found)


def _host(member: int | str, hosts: Sequence[str]) -> str:
    return member if isinstance(member, str) else hosts[member]


def _name(member: int | str, hosts: Sequence[str]) -> str:
    return member if isinstance(member, str) else f"rank {member} ({hosts[member]})"
