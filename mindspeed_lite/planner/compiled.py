"""Times of a schedule for many costs: its dependencies are resolved once.

Same rules as `pipeline.simulate` without shared queues.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_lite.pipeline.costs import Costs
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.steps import Entry, Message, Schedule, steps_of

from . import orders
from .training import TrainingConfig


@dataclass(frozen=True)
class CompiledSchedule:
    """Entries in an order that respects dependencies.

    Attributes:
        entries: rank, index of its cost, messages needed, and messages sent with their link, or -1 on the rank.
        distinct: rank and entry of each cost.
    """

    schedule: Schedule
    entries: Sequence[tuple[int, int, tuple[int, ...], tuple[tuple[int, int], ...]]]
    distinct: Sequence[tuple[int, Entry]]
    messages: int
    links: int

    def ends(self, costs: Costs) -> list[float]:
        """Seconds at which each rank ends."""
        seconds = [costs.seconds(self.schedule, rank, entry) for rank, entry in self.distinct]
        arrived, free = [0.0] * self.messages, [0.0] * self.links
        clock = [0.0] * self.schedule.num_ranks
        for rank, cost, needed, sent in self.entries:
            now = clock[rank]
            for message in needed:
                if arrived[message] > now:
                    now = arrived[message]
            now += seconds[cost]
            clock[rank] = now
            for message, link in sent:
                if link < 0:
                    arrived[message] = now
                else:
                    free[link] = arrived[message] = max(now, free[link]) + costs.message
        return clock


def compiled(training: TrainingConfig, microbatches: int = 0) -> CompiledSchedule:
    """Of `orders.schedule`; raises ArgumentError."""
    return _compiled(*orders.key(training, microbatches))


@functools.lru_cache(maxsize=256)
def _compiled(name: str, shape: PipelineShape, overlaps: bool) -> CompiledSchedule:
    schedule = orders.built(name, shape, overlaps)
    slots: dict[Message, int] = {}
    links: dict[tuple[int, int], int] = {}
    distinct: dict[object, int] = {}
    kinds: list[tuple[int, Entry]] = []
    entries = []
    done = [0] * schedule.num_ranks
    waiting: dict[Message, int] = {}
    runnable = deque(range(schedule.num_ranks))
    while runnable:
        rank = runnable.popleft()
        for entry in schedule.ranks[rank][done[rank] :]:
            steps = steps_of(entry)
            inputs = [each for step in steps for each in schedule.predecessors(rank, step)]
            missing = next((each for each in inputs if each not in slots), None)
            if missing is not None:
                waiting[missing] = rank
                break
            done[rank] += 1
            key = rank, tuple((step.kind, step.chunk) for step in steps)
            if key not in distinct:
                distinct[key] = len(kinds)
                kinds.append((rank, entry))
            sent = []
            for step in steps:
                message = schedule.output(rank, step)
                for each in {Message(rank, rank, step), *([message] if message else [])}:
                    slots[each] = len(slots)
                    link = -1 if each.is_local else links.setdefault(each[:2], len(links))
                    sent.append((slots[each], link))
                    if each in waiting:
                        runnable.append(waiting.pop(each))
            entries.append((rank, distinct[key], tuple(slots[each] for each in inputs), tuple(sent)))
    return CompiledSchedule(schedule, entries, kinds, len(slots), len(links))
