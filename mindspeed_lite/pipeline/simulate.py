"""Simulates a pipeline schedule: timing, waits, deadlocks.

An entry begins when the previous one has ended and its inputs have arrived. Messages leave at its end and overlap with
computation; a link carries one at a time. With `Costs.one_queue`, both directions share a queue, like a communicator
with issue order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from .costs import Costs
from .steps import Entry, Message, Schedule, steps_of


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
    """Times of a simulated or recorded training step."""

    schedule: Schedule
    ranks: tuple[tuple[TimedEntry, ...], ...]

    @cached_property
    def makespan(self) -> float:
        return max(self.ends, default=0.0)

    @property
    def ends(self) -> list[float]:
        """Seconds at which each rank ends."""
        return [entries[-1].end if entries else 0.0 for entries in self.ranks]

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
        return sum(map(self.idle, range(len(self.ranks)))) / whole if whole else 0.0

    @property
    def exposed_share(self) -> float:
        """Share of time spent waiting for messages in flight."""
        whole = self.makespan * len(self.ranks)
        return sum(map(self.exposed, range(len(self.ranks)))) / whole if whole else 0.0

    def messages(self) -> list[Message]:
        """All messages between ranks, by the end of their step."""
        found: list[tuple[float, int, Message]] = []
        for rank, entries in enumerate(self.ranks):
            for timed in entries:
                for step in steps_of(timed.entry):
                    message = self.schedule.output(rank, step)
                    if message is not None and not message.is_local:
                        found.append((timed.end, rank, message))
        # Stable sort: a pair's steps end together.
        return [message for _, _, message in sorted(found, key=lambda each: each[:2])]


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Simulate a schedule. Raises DeadlockError."""
    found = _simulate(schedule, costs, _Links(costs.message))
    if not costs.one_queue:
        return found
    queues: dict[frozenset[int], deque[Message]] = {}
    for message in found.messages():
        queues.setdefault(frozenset(message[:2]), deque()).append(message)
    return _simulate(schedule, costs, _Links(costs.message, queues))


def ends_of_step(schedule: Callable[[int], Schedule], costs: Costs, count: int, unit: int) -> list[float]:
    """Seconds at which each rank ends `count` micro-batches, extrapolated by the third `unit` of them.

    schedule: of a number of micro-batches.
    """

    def ends(batches: int) -> list[float]:
        return simulate(schedule(batches), costs).ends

    if count <= 3 * unit:
        return ends(count)
    rest = count % unit
    few, more = ends(2 * unit + rest), ends(3 * unit + rest)
    units = (count - 2 * unit - rest) / unit
    return [low + (high - low) * units for low, high in zip(few, more, strict=True)]


class _Links:
    """Simulated links. queues: messages of each pair of ranks in issue order; None: a link per direction."""

    def __init__(self, seconds: float, queues: Mapping[frozenset[int], deque[Message]] | None = None) -> None:
        self._seconds, self._queues = seconds, queues
        self._free: dict[object, float] = {}
        self._sent: dict[Message, float] = {}

    def send(self, message: Message, now: float) -> Iterator[tuple[Message, float, float]]:
        """Messages that can now travel, with the times of their send and arrival."""
        if self._queues is None:
            yield message, now, self._carry(message[:2], now)
            return
        link = frozenset(message[:2])
        queue, self._sent[message] = self._queues[link], now
        while queue and queue[0] in self._sent:
            ahead = queue.popleft()
            yield ahead, self._sent[ahead], self._carry(link, self._sent[ahead])

    def _carry(self, link: object, now: float) -> float:
        self._free[link] = max(now, self._free.get(link, 0.0)) + self._seconds
        return self._free[link]


def _simulate(schedule: Schedule, costs: Costs, links: _Links) -> Simulation:
    ranks = range(schedule.num_ranks)
    timed: list[list[TimedEntry]] = [[] for _ in ranks]
    # Send and arrival times of each output; a rank's own ones count as messages to itself.
    ready: dict[Message, tuple[float, float]] = {}
    waiting: dict[Message, int] = {}
    clock = [0.0] * schedule.num_ranks
    runnable = deque(ranks)
    while runnable:
        rank = runnable.popleft()
        while len(timed[rank]) < len(schedule.ranks[rank]):
            entry = schedule.ranks[rank][len(timed[rank])]
            inputs = [each for step in steps_of(entry) for each in schedule.predecessors(rank, step)]
            missing = next((each for each in inputs if each not in ready), None)
            if missing is not None:
                waiting[missing] = rank
                break
            sent, there = max((ready[each] for each in inputs), key=lambda pair: pair[1], default=(0.0, 0.0))
            begin = max(clock[rank], there)
            exposed = max(0.0, begin - max(clock[rank], sent)) if there == begin else 0.0
            clock[rank] = end = begin + costs.seconds(schedule, rank, entry)
            timed[rank].append(TimedEntry(entry, begin, end, exposed))
            for step in steps_of(entry):
                ready[Message(rank, rank, step)] = (end, end)
                message = schedule.output(rank, step)
                if message is not None and not message.is_local:
                    for arrived, sent, there in links.send(message, end):
                        ready[arrived] = (sent, there)
                        if arrived in waiting:
                            runnable.append(waiting.pop(arrived))
    for rank in ranks:
        if len(timed[rank]) < len(schedule.ranks[rank]):
            raise DeadlockError(_deadlock(schedule, rank, len(timed[rank]), ready))
    return Simulation(schedule, tuple(map(tuple, timed)))


def _deadlock(schedule: Schedule, rank: int, place: int, ready: Collection[Message]) -> str:
    entry = schedule.ranks[rank][place]
    needed = [each for step in steps_of(entry) for each in schedule.predecessors(rank, step)]
    missing = " and ".join(f"{each.step} of rank {each.source}" for each in needed if each not in ready)
    return f"{schedule.name}: deadlock: rank {rank} waits at entry {place} ({entry}) for {missing}"
