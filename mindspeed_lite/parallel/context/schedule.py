"""Ring attention as a list of steps for each rank.

Keys and values of a block travel during the previous block. In backward the owner's gradient sum follows: each rank
adds its block's, the last one returns it.

A double ring rotates within windows of `window` adjacent ranks; the hop to the next window overlaps with a whole inner
rotation, for slow links between hosts.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Move(NamedTuple):
    """Keys and values of `owner`, or their gradient sum.

    lane: 0 for hops the next block waits for; 1 for longer ones and sums.
    """

    what: Literal["kv", "sum"]
    direction: Literal["send", "receive"]
    owner: int
    peer: int
    lane: int


@dataclass(frozen=True)
class RingStep:
    """Messages to start, then the block of `owner`.

    moves: in the posting order of both sides.
    computes: whether any of the owner's keys is visible.
    receives_sum: adds to a received sum.
    """

    moves: tuple[Move, ...]
    owner: int
    computes: bool
    receives_sum: bool = False


@dataclass(frozen=True)
class Program:
    """Steps of one rank; `last`: moves after the last backward block."""

    rank: int
    forward: tuple[RingStep, ...]
    backward: tuple[RingStep, ...]
    last: tuple[Move, ...]


# needed[reader][owner]: whether a query of `reader` sees a key of `owner`.
Needed = tuple[tuple[bool, ...], ...]
# (step, rank) -> messages to start.
_Moves = dict[tuple[int, int], tuple[Move, ...]]


@functools.lru_cache(maxsize=256)
def programs(ranks: int, window: int = 1, needed: Needed | None = None, kv_again: bool = True) -> tuple[Program, ...]:
    """Programs of a ring (`window` 1 or `ranks`) or double ring.

    Args:
        window: ranks of an inner ring.
        needed: blocks to compute, default all; keys no later rank needs are not sent.
        kv_again: send keys and values in backward too; False if cached.

    Raises:
        ValueError: `window` does not divide `ranks`.
    """
    if window < 1 or ranks % window:
        raise ValueError(f"a double ring's window of {window} ranks does not divide a ring of {ranks} ranks")
    needed = needed or ((True,) * ranks,) * ranks
    kv, sums, added = _moves(ranks, window, needed)
    made = []
    for rank in range(ranks):
        forward, backward = [], []
        for number, owner in enumerate(_ring_order(ranks, window, rank, -1)):
            computes, moves = needed[rank][owner], kv.get((number, rank), ())
            forward.append(RingStep(moves, owner, computes))
            moves = (*sums.get((number, rank), ()), *(moves if kv_again else ()))
            backward.append(RingStep(moves, owner, computes, (rank, owner) in added))
        made.append(Program(rank, tuple(forward), tuple(backward), sums.get((ranks, rank), ())))
    return tuple(made)


def _ring_order(ranks: int, window: int, rank: int, sign: int) -> list[int]:
    """By step: owners of a rank's blocks (sign -1), readers of an owner's block (sign 1)."""
    windows = ranks // window
    outer, inner = divmod(rank, window)
    return [
        (outer + sign * turn) % windows * window + (inner + sign * hop) % window
        for turn in range(windows)
        for hop in range(window)
    ]


def _moves(ranks: int, window: int, needed: Needed) -> tuple[_Moves, _Moves, set[tuple[int, int]]]:
    """(KV hops, sum hops, (reader, owner) that adds to a received sum).

    A sum leaves after the previous step's block; step `ranks` is the end of the pass.
    """
    kv: _Moves = {}
    sums: _Moves = {}
    added: set[tuple[int, int]] = set()
    for owner in range(ranks):
        readers = _ring_order(ranks, window, owner, 1)
        computing = [step for step, reader in enumerate(readers) if step and needed[reader][owner]]
        # The previous hop in the window, or the previous window.
        parents = {step: step - 1 if step % window else step - window for step in range(1, ranks)}
        wanted = set(computing)
        for step in range(ranks - 1, 0, -1):
            if step in wanted:
                wanted.add(parents[step])
        for step in sorted(wanted - {0}):
            lane = int(step - parents[step] > 1)
            _put(kv, parents[step], owner, (readers[parents[step]], readers[step]), "kv", lane)
        for step, following in itertools.zip_longest(computing, computing[1:]):
            target = owner if following is None else readers[following]
            _put(sums, step + 1, owner, (readers[step], target), "sum", 1)
        added |= {(readers[step], owner) for step in computing[1:]}
    return kv, sums, added


def _put(moves: _Moves, step: int, owner: int, hop: tuple[int, int], what: Literal["kv", "sum"], lane: int) -> None:
    source, target = hop
    moves[step, source] = (*moves.get((step, source), ()), Move(what, "send", owner, target, lane))
    moves[step, target] = (*moves.get((step, target), ()), Move(what, "receive", owner, source, lane))
