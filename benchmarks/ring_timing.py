"""How long a ring's steps take: ranks that compute and wait, and links that carry one message after the other.

What no order of the same steps can hide is left: what messages take longer than the blocks beside them, and the last
sums' way home. Copies, sums and latency take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from mindspeed_lite.parallel.context.ring import Move, Program


class RingTiming(NamedTuple):
    """seconds: until the slowest rank is ready; waited: those of them that it did not compute."""

    seconds: float
    waited: float


# (what, owner, receiver): in one pass each comes once.
_Key = tuple[str, int, int]


class _Action(NamedTuple):
    """One of: messages that start, one that is waited for, a block that is computed."""

    moves: tuple[Move, ...] = ()
    awaited: _Key | None = None
    computes: bool = False


def simulate(
    programs: Sequence[Program],
    block: float,
    message: Callable[[int, Move], float],
    *,
    backward: bool = False,
    at_once: bool = False,
    link: Callable[[int, int], Hashable] = lambda source, target: source,
) -> RingTiming:
    """One pass of all ranks.

    Args:
        programs: of every rank, in order.
        block: seconds of a block's products; all blocks take as long, as those of a causal zigzag do.
        message: seconds that a message takes its link, from its sender's rank and move.
        backward: which pass.
        at_once: every step waits for its messages before it computes: the same ring without overlap.
        link: which one a message from one rank to another takes; one for each sender by default.
    """
    free: dict[Hashable, float] = {}
    arrivals: dict[_Key, float] = {}
    left = [list(_actions(program, backward, at_once))[::-1] for program in programs]
    now, computed = [0.0] * len(programs), [0.0] * len(programs)
    while any(left):
        ready = [
            rank for rank, its in enumerate(left) if its and (its[-1].awaited is None or its[-1].awaited in arrivals)
        ]
        if not ready:
            raise ValueError("the programs wait for messages that none of them sends")
        # In the order of time, for links that several ranks share.
        rank = min(ready, key=lambda each: now[each])
        action = left[rank].pop()
        for move in action.moves:
            if move.direction == "send":
                way = link(rank, move.peer)
                free[way] = max(free.get(way, 0.0), now[rank]) + message(rank, move)
                arrivals[move.what, move.owner, move.peer] = free[way]
        if action.awaited is not None:
            now[rank] = max(now[rank], arrivals[action.awaited])
        if action.computes:
            now[rank] += block
            computed[rank] += block
    slowest = max(range(len(now)), key=lambda each: now[each])
    return RingTiming(now[slowest], now[slowest] - computed[slowest])


def _actions(program: Program, backward: bool, at_once: bool) -> Iterator[_Action]:
    """What a rank does in order; the same as `ring` does."""
    rank = program.rank
    coming: set[tuple[str, int]] = set()

    def start(moves: tuple[Move, ...]) -> Iterator[_Action]:
        yield _Action(moves)
        for move in moves:
            if move.direction == "receive":
                coming.add((move.what, move.owner))
            if at_once:
                yield _Action(awaited=(move.what, move.owner, rank if move.direction == "receive" else move.peer))

    for step in program.backward if backward else program.forward:
        if ("kv", step.owner) in coming:
            yield _Action(awaited=("kv", step.owner, rank))
        yield from start(step.moves)
        if step.computes:
            yield _Action(computes=True)
            if step.receives_sum:
                yield _Action(awaited=("sum", step.owner, rank))
    if backward:
        yield from start(program.last)
        if ("sum", rank) in coming:
            yield _Action(awaited=("sum", rank, rank))
