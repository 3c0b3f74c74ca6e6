"""Simulates a pipeline schedule: timing, waits, deadlocks.

An entry begins when the previous one has ended and its inputs have arrived. Messages leave at its end and overlap with
computation; a link carries one at a time. With `Costs.one_queue`, both directions share a queue, like a communicator
with issue order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from .costs import Costs
from .steps import Entry, Schedule, Step, output_message, steps_of


class DeadlockError(ValueError):
    pass


@dataclass(frozen=True)
class TimedEntry:
    """Entry with times in seconds; exposed: preceding wait for a message in flight."""

    entry: Entry
    begin: float
    end: float
    exposed: float = 0.0


@dataclass(frozen=True)
class Simulation:
    schedule: Schedule
    costs: Costs
    ranks: tuple[tuple[TimedEntry, ...], ...]

    @cached_property
    def makespan(self) -> float:
        return max((entries[-1].end for entries in self.ranks if entries), default=0.0)

    def busy(self, rank: int) -> float:
        return sum(each.end - each.begin for each in self.ranks[rank])

    def idle(self, rank: int) -> float:
        return self.makespan - self.busy(rank)

    def exposed(self, rank: int) -> float:
        return sum(each.exposed for each in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """Idle share, including waits for messages."""
        whole = self.makespan * len(self.ranks)
        return sum(self.idle(rank) for rank in range(len(self.ranks))) / whole if whole else 0.0

    @property
    def exposed_share(self) -> float:
        """Share of time spent waiting for messages in flight."""
        whole = self.makespan * len(self.ranks)
        return sum(self.exposed(rank) for rank in range(len(self.ranks))) / whole if whole else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Raises DeadlockError."""
    found = _simulate(schedule, costs, _Links(costs.message))
    if not costs.one_queue:
        return found
    # Both ranks issue their messages in the order in which their steps end.
    ends = [
        (timed.end, rank, step)
        for rank, entries in enumerate(found.ranks)
        for timed in entries
        for step in steps_of(timed.entry)
    ]
    queues: dict[frozenset[int], deque[tuple[int, Step]]] = {}
    for _, rank, step in sorted(ends, key=lambda each: each[:2]):
        message = output_message(schedule, rank, step)
        if message is not None and not message.is_local:
            queues.setdefault(frozenset((rank, message.target)), deque()).append((rank, step))
    return _simulate(schedule, costs, _Links(costs.message, queues))


class _Links:
    """queues: by pair of ranks, the (rank, step) with messages in sequence."""

    def __init__(self, seconds: float, queues: Mapping[frozenset[int], deque[tuple[int, Step]]] | None = None) -> None:
        self._seconds, self._queues = seconds, queues
        self._free: dict[object, float] = {}
        self._sent: dict[tuple[int, Step], tuple[float, int]] = {}

    def send(
        self, rank: int, step: Step, target: int, now: float
    ) -> Iterator[tuple[tuple[int, int, Step], float, float]]:
        if self._queues is None:
            yield (target, rank, step), now, self._carry((rank, target), now)
            return
        link = frozenset((rank, target))
        queue, self._sent[rank, step] = self._queues[link], (now, target)
        while queue and queue[0] in self._sent:
            source, ahead = queue[0]
            sent, receiver = self._sent[queue.popleft()]
            yield (receiver, source, ahead), sent, self._carry(link, sent)

    def _carry(self, link: object, now: float) -> float:
        self._free[link] = max(now, self._free.get(link, 0.0)) + self._seconds
        return self._free[link]


def _simulate(schedule: Schedule, costs: Costs, links: _Links) -> Simulation:
    ranks = range(schedule.num_ranks)
    timed: list[list[TimedEntry]] = [[] for _ in ranks]
    # (reading rank, rank, step) -> send and arrival times of its output.
    ready: dict[tuple[int, int, Step], tuple[float, float]] = {}
    waiting: dict[tuple[int, int, Step], int] = {}
    clock = [0.0] * schedule.num_ranks
    runnable = deque(ranks)
    while runnable:
        rank = runnable.popleft()
        while len(timed[rank]) < len(schedule.ranks[rank]):
            entry = schedule.ranks[rank][len(timed[rank])]
            inputs = [(rank, *each) for step in steps_of(entry) for each in schedule.predecessors(rank, step)]
            missing = next((each for each in inputs if each not in ready), None)
            if missing is not None:
                waiting[missing] = rank
                break
            sent, there = max((ready[each] for each in inputs), key=lambda pair: pair[1], default=(0.0, 0.0))
            free = clock[rank] + (costs.seconds_after(timed[rank][-1].entry) if timed[rank] else 0.0)
            begin = max(free, there)
            exposed = max(0.0, begin - max(free, sent)) if there == begin else 0.0
            clock[rank] = end = begin + costs.seconds(schedule, rank, entry)
            timed[rank].append(TimedEntry(entry, begin, end, exposed))
            for step in steps_of(entry):
                ready[rank, rank, step] = (end, end)
                message = output_message(schedule, rank, step)
                if message is not None and not message.is_local:
                    for key, sent, there in links.send(rank, step, message.target, end):
                        ready[key] = (sent, there)
                        if key in waiting:
                            runnable.append(waiting.pop(key))
    for rank in ranks:
        if len(timed[rank]) < len(schedule.ranks[rank]):
            raise DeadlockError(_deadlock(schedule, rank, len(timed[rank]), ready))
    return Simulation(schedule, costs, tuple(map(tuple, timed)))


def _deadlock(
    schedule: Schedule, rank: int, place: int, ready: dict[tuple[int, int, Step], tuple[float, float]]
) -> str:
    entry = schedule.ranks[rank][place]
    missing = [
        f"{step} of rank {source}"
        for each in steps_of(entry)
        for source, step in schedule.predecessors(rank, each)
        if (rank, source, step) not in ready
    ]
    return f"{schedule.name}: deadlock: rank {rank} waits at entry {place} ({entry}) for {' and '.join(missing)}"
