"""Derives a rank's steps and communication calls from a schedule.

A call may block until its peer's call, and a communicator may run operations in issue order. To exclude deadlocks, all
ranks issue messages in one global order: the end of the senders' steps in a simulation. The first unfinished message
can then proceed: its sender needs only earlier ones, and its receiver issues nothing later before it.

A receive is issued `lookahead` steps early, or before a later message of the global order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from .costs import uniform
from .simulate import simulate
from .steps import Entry, Kind, Message, OverlappedPair, Schedule, Step, steps_of

# All neighbours' messages, one ring direction's, or a single one.
Joining = Literal["all", "one way", "none"]


class Transfer(NamedTuple):
    to_next: Message | None = None
    to_prev: Message | None = None
    from_prev: Message | None = None
    from_next: Message | None = None


class PassWork(NamedTuple):
    """A step, or a forward and a backward in one call; their inputs and outputs may be messages to the rank itself."""

    steps: tuple[Step, ...]
    takes: tuple[Message | None, ...]
    gives: tuple[Message | None, ...]


# What a rank executes, in order.
Program = tuple[Transfer | PassWork, ...]


def compile_program(
    schedule: Schedule, rank: int, lookahead: int = 0, joining: Joining = "all", pairs: bool = False
) -> Program:
    """Compile a rank's program.

    lookahead: works by which receives are early, if the order allows it.
    joining: what one call may carry; "none" if calls first exchange something else, such as lengths.
    pairs: run overlapped pairs in one call.

    Raises:
        ValueError: a deadlock, or a message to a rank that is no ring neighbour.
    """
    works = [
        PassWork(
            steps,
            tuple(schedule.input(rank, step) for step in steps),
            tuple(schedule.output(rank, step) for step in steps),
        )
        for entry in schedule.ranks[rank]
        for steps in _calls(entry, pairs)
    ]
    messages = simulate(schedule, uniform(schedule.num_stages)).messages()
    order = [each for each in messages if rank in (each.source, each.target)]
    before: list[list[Message]] = [[] for _ in range(len(works) + 1)]
    for message, place in zip(order, _places(works, order, rank, lookahead), strict=True):
        before[place].append(message)
    program: list[Transfer | PassWork] = []
    for found, work in itertools.zip_longest(before, works):
        program += _join(found, rank, schedule.num_ranks, joining)
        program += [work] if work is not None else []
    return tuple(program)


def _calls(entry: Entry, pairs: bool) -> list[tuple[Step, ...]]:
    if pairs and isinstance(entry, OverlappedPair) and entry.backward.kind is Kind.BACKWARD:
        return [steps_of(entry)]
    return [(step,) for step in steps_of(entry)]


def _places(works: Sequence[PassWork], order: Sequence[Message], rank: int, lookahead: int) -> list[int]:
    """Work before which each message is issued."""
    own: dict[Message | None, int] = {}
    for index, work in enumerate(works):
        own |= dict.fromkeys(work.takes, index) | dict.fromkeys(work.gives, index + 1)
    latest: list[int] = []
    for message in reversed(order):
        latest.append(min(own[message], latest[-1]) if latest else own[message])
    places: list[int] = []
    for message, place in zip(order, reversed(latest), strict=True):
        wanted = place if message.source == rank else max(0, place - lookahead)
        places.append(max(wanted, places[-1]) if places else wanted)
    return places


def _join(messages: Sequence[Message], rank: int, ranks: int, joining: Joining) -> Iterator[Transfer]:
    onward, back = {"to_next", "from_prev"}, {"to_prev", "from_next"}
    call: dict[str, Message] = {}
    for message in messages:
        slot = _slot(message, rank, ranks)
        same_way = call.keys() <= (onward if slot in onward else back)
        fits = {"all": True, "one way": same_way, "none": False}[joining]
        if call and (slot in call or not fits):
            yield Transfer(**call)
            call = {}
        call[slot] = message
    if call:
        yield Transfer(**call)


def _slot(message: Message, rank: int, ranks: int) -> str:
    # With two ranks, all sends share one slot and all receives the other.
    is_sent = message.source == rank
    other = message.target if is_sent else message.source
    if other == (rank + (1 if is_sent else -1)) % ranks:
        return "to_next" if is_sent else "from_prev"
    if other == (rank + (-1 if is_sent else 1)) % ranks:
        return "to_prev" if is_sent else "from_next"
    raise ValueError(
        f"{message.step} of rank {message.source} is sent to rank {message.target}: only neighbours in the ring of "
        "ranks exchange tensors"
    )
