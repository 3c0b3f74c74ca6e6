"""Derives a rank's steps and communication calls from a schedule.

A call may block until its peer's call, and a communicator may run operations in issue order. To exclude deadlocks, all
ranks issue messages in one global order: the end of the senders' steps in a simulation. The first unfinished message
can then proceed: its sender needs only earlier ones, and its receiver issues nothing later before it.

A receive is issued `lookahead` steps early, or before a later message of the global order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from .costs import uniform
from .simulate import simulate
from .steps import Entry, Kind, Message, OverlappedPair, Schedule, Step, input_message, output_message, steps_of

# All neighbours' messages, one ring direction's, or a single one.
Joining = Literal["all", "one way", "none"]


class Transfer(NamedTuple):
    to_next: Message | None = None
    to_prev: Message | None = None
    from_prev: Message | None = None
    from_next: Message | None = None


class BoundStep(NamedTuple):
    """Step whose input and output may be messages to the rank itself."""

    step: Step
    takes: Message | None
    gives: Message | None


@dataclass(frozen=True)
class RankProgram:
    """Steps and calls of a rank.

    transfers: `transfers[i]` are the calls before step i; the last entry follows the last step.
    paired: indices of forwards that run in one call with the next backward.
    """

    works: tuple[BoundStep, ...]
    transfers: tuple[tuple[Transfer, ...], ...]
    paired: frozenset[int] = frozenset()

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return tuple(work.step for work in self.works)


def compile_program(
    schedule: Schedule, rank: int, lookahead: int = 0, joining: Joining = "all", pairs: bool = False
) -> RankProgram:
    """Compile a rank's program.

    lookahead: steps by which receives are early, if the order allows it.
    joining: what one call may carry; "none" if calls first exchange something else, such as lengths.
    pairs: run overlapped pairs in one call.

    Raises:
        ValueError: a deadlock, or a message to a rank that is no ring neighbour.
    """
    works = tuple(
        BoundStep(step, input_message(schedule, rank, step), output_message(schedule, rank, step))
        for step in schedule.steps(rank)
    )
    order = [each for each in _global_order(schedule) if rank in (each.source, each.target)]
    paired = frozenset(_pairs(schedule.ranks[rank]) if pairs else ())
    calls: list[list[Message]] = [[] for _ in range(len(works) + 1)]
    for message, place in zip(order, _places(works, order, rank, lookahead, paired), strict=True):
        calls[place].append(message)
    transfers = tuple(tuple(_join(each, rank, schedule.num_ranks, joining)) for each in calls)
    return RankProgram(works, transfers, paired)


def _pairs(entries: Sequence[Entry]) -> Iterator[int]:
    place = 0
    for entry in entries:
        if isinstance(entry, OverlappedPair) and entry.backward.kind is Kind.BACKWARD:
            yield place
        place += len(steps_of(entry))


def _global_order(schedule: Schedule) -> list[Message]:
    """All messages, by the end of their sender's step."""
    found: list[tuple[float, int, Message]] = []
    for rank, entries in enumerate(simulate(schedule, uniform(schedule.num_stages)).ranks):
        for timed in entries:
            for step in steps_of(timed.entry):
                message = output_message(schedule, rank, step)
                if message is not None and not message.is_local:
                    found.append((timed.end, rank, message))
    # Stable sort: a pair's steps end together.
    return [message for _, _, message in sorted(found, key=lambda each: each[:2])]


def _places(
    works: Sequence[BoundStep], order: Sequence[Message], rank: int, lookahead: int, paired: frozenset[int]
) -> list[int]:
    """Step before which each message is issued; never inside a pair."""
    own: dict[Message, int] = {}
    for index, work in enumerate(works):
        if work.takes is not None:
            own[work.takes] = index - (index - 1 in paired)
        if work.gives is not None:
            own[work.gives] = index + 1 + (index in paired)
    latest: list[int] = []
    for message in reversed(order):
        latest.append(min(own[message], latest[-1]) if latest else own[message])
    places: list[int] = []
    for message, place in zip(order, reversed(latest), strict=True):
        wanted = place if message.source == rank else max(0, place - lookahead)
        wanted -= wanted - 1 in paired
        places.append(max(wanted, places[-1]) if places else wanted)
    return places


def _join(messages: Sequence[Message], rank: int, ranks: int, joining: Joining) -> Iterator[Transfer]:
    call: dict[str, Message] = {}
    for message in messages:
        slot = _slot(message, rank, ranks)
        fits = {"all": True, "one way": call.keys() <= _SAME_WAY[slot], "none": False}[joining]
        if call and (slot in call or not fits):
            yield Transfer(**call)
            call = {}
        call[slot] = message
    if call:
        yield Transfer(**call)


_ONWARD, _BACKWARD = frozenset(("to_next", "from_prev")), frozenset(("to_prev", "from_next"))
_SAME_WAY = {slot: way for way in (_ONWARD, _BACKWARD) for slot in way}


def _slot(message: Message, rank: int, ranks: int) -> str:
    ahead, behind = (rank + 1) % ranks, (rank - 1) % ranks
    # With two ranks, all sends share one slot and all receives the other.
    if message.source == rank and message.target in (ahead, behind):
        return "to_next" if message.target == ahead else "to_prev"
    if message.target == rank and message.source in (ahead, behind):
        return "from_prev" if message.source == behind else "from_next"
    raise ValueError(f"message {message}: only neighbours in the ring of ranks exchange tensors")
