"""A ring of ranks as a list of steps that can be printed and simulated: what travels when, and what is computed.

Every rank computes one block (its queries against one owner's keys and values) a step. Keys and values travel while
the block before is computed. In the backward pass they travel again, and behind them the sum of the gradients of an
owner's keys and values: each rank adds what its block contributes and passes the sum on; the last sends it home. What
an owner's own queries contribute stays at home, so that this sum makes one hop less.

A double ring cuts the ranks into windows of `window` adjacent ones. The inner ring turns within a window; the outer
hop, from window to window, starts when a window's turn begins and is needed only at its end, so that a slow link
between hosts has the time of `window` blocks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Move(NamedTuple):
    """One message of a rank: the keys and values of `owner`, or the sum of their gradients, to or from `peer`.

    lane: 0 for hops that the next block waits for; 1 for those that have longer, and for sums.
    """

    what: Literal["kv", "sum"]
    direction: Literal["send", "receive"]
    owner: int
    peer: int
    lane: int

    def __str__(self) -> str:
        return f"{self.direction} {self.what}{self.owner} {'to' if self.direction == 'send' else 'from'} {self.peer}"


@dataclass(frozen=True)
class RingStep:
    """What a rank does between two meetings with its neighbours.

    moves: messages that start here, before the block is computed, in the order in which both sides post them.
    owner: whose keys and values the block needs; they have come with a move of an earlier step, or are its own.
    computes: whether the rank's queries see any of them.
    receives_sum: whether the sum of the other ranks' gradients for `owner` has come, to which the block is added.
    """

    moves: tuple[Move, ...]
    owner: int
    computes: bool
    receives_sum: bool = False

    def __str__(self) -> str:
        words = [*map(str, self.moves)]
        if self.computes:
            words.append(f"compute block {self.owner}" + (f", add sum{self.owner}" if self.receives_sum else ""))
        return "; ".join(words) or "-"


@dataclass(frozen=True)
class Program:
    """The steps of one rank in both passes; `last` are the moves behind the last block of the backward pass."""

    rank: int
    forward: tuple[RingStep, ...]
    backward: tuple[RingStep, ...]
    last: tuple[Move, ...]

    def __str__(self) -> str:
        lines = [f"rank {self.rank}"]
        for name, steps in (("forward", self.forward), ("backward", self.backward)):
            lines += [f"  {name} {number}: {step}" for number, step in enumerate(steps)]
        return "\n".join([*lines, f"  home: {'; '.join(map(str, self.last)) or '-'}"])


# (reader, owner) -> whether any query of the one sees a key of the other.
Needs = Callable[[int, int], bool]


def everything(reader: int, owner: int) -> bool:
    """Every rank needs every block."""
    return True


def programs(ranks: int, window: int = 1, needs: Needs = everything, *, kv_again: bool = True) -> tuple[Program, ...]:
    """The program of each rank of a ring (`window` 1 or `ranks`) or double ring.

    Args:
        ranks: how many.
        window: ranks of an inner ring; divides `ranks`.
        needs: blocks that no query sees are neither computed nor, if no later rank needs them, sent.
        kv_again: whether keys and values travel in the backward pass too; not if the forward pass kept them.

    Raises:
        ValueError: `window` does not divide `ranks`.
    """
    if window < 1 or ranks % window:
        raise ValueError(f"a double ring's window of {window} ranks does not divide a ring of {ranks} ranks")
    kv = _kv_moves(ranks, window, needs)
    sums = _sum_moves(ranks, window, needs)
    orders = [_order(ranks, window, rank) for rank in range(ranks)]
    made = []
    for rank, order in enumerate(orders):
        forward, backward = [], []
        for number, owner in enumerate(order):
            computes, moves = needs(rank, owner), kv.get((number, rank), ())
            forward.append(RingStep(moves, owner, computes))
            again = moves if kv_again else ()
            comes = any(
                move.direction == "receive" and move.owner == owner != rank
                for step in range(number + 1)
                for move in sums.get((step, rank), ())
            )
            backward.append(RingStep((*sums.get((number, rank), ()), *again), owner, computes, comes and computes))
        made.append(Program(rank, tuple(forward), tuple(backward), sums.get((ranks, rank), ())))
    return tuple(made)


def _order(ranks: int, window: int, rank: int) -> list[int]:
    """The owners of a rank's blocks, in the order in which it computes them."""
    windows = ranks // window
    outer, inner = divmod(rank, window)
    return [
        (outer - turn) % windows * window + (inner - hop) % window for turn in range(windows) for hop in range(window)
    ]


def _readers(ranks: int, window: int, owner: int) -> list[int]:
    """The rank that has an owner's block at each step."""
    windows = ranks // window
    outer, inner = divmod(owner, window)
    return [
        (outer + turn) % windows * window + (inner + hop) % window for turn in range(windows) for hop in range(window)
    ]


_Moves = dict[tuple[int, int], tuple[Move, ...]]


def _kv_moves(ranks: int, window: int, needs: Needs) -> _Moves:
    """(step, rank) -> the hops of keys and values that start there."""
    moves: _Moves = {}
    for owner in range(ranks):
        readers = _readers(ranks, window, owner)
        # The step that a reader has the block from: the hop before in its window, or the window before.
        parents = {step: step - 1 if step % window else step - window for step in range(1, ranks)}
        wanted = {step for step, reader in enumerate(readers) if needs(reader, owner)}
        for step in range(ranks - 1, 0, -1):
            if step in wanted:
                wanted.add(parents[step])
        for step in sorted(wanted - {0}):
            lane = int(step - parents[step] > 1)
            _put(moves, parents[step], owner, (readers[parents[step]], readers[step]), "kv", lane)
    return moves


def _sum_moves(ranks: int, window: int, needs: Needs) -> _Moves:
    """(step, rank) -> the hops of sums that start there, after the block of the step before; step `ranks`: the end."""
    moves: _Moves = {}
    for owner in range(ranks):
        readers = _readers(ranks, window, owner)
        steps = [step for step, reader in enumerate(readers) if step and needs(reader, owner)]
        for step, following in itertools.zip_longest(steps, steps[1:]):
            target = owner if following is None else readers[following]
            _put(moves, step + 1, owner, (readers[step], target), "sum", 1)
    return moves


def _put(moves: _Moves, step: int, owner: int, hop: tuple[int, int], what: Literal["kv", "sum"], lane: int) -> None:
    source, target = hop
    moves[step, source] = (*moves.get((step, source), ()), Move(what, "send", owner, target, lane))
    moves[step, target] = (*moves.get((step, target), ()), Move(what, "receive", owner, source, lane))


@functools.lru_cache(maxsize=256)
def ring(ranks: int, window: int, kv_again: bool, needed: tuple[tuple[bool, ...], ...]) -> tuple[Program, ...]:
    """`programs`, remembered; needed[reader][owner]."""
    return programs(ranks, window, lambda reader, owner: needed[reader][owner], kv_again=kv_again)
