"""The routing of a ring, checked by sending tags: every block goes where it is needed, and every sum comes home."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from mindspeed_lite.parallel.context import ring
from mindspeed_lite.parallel.context.layout import CAUSAL, FREE, needs, zigzag

SIZES = [(ranks, window) for ranks in range(1, 13) for window in range(1, ranks + 1) if ranks % window == 0]


class Broken(AssertionError):
    """A program that computes the wrong thing, loses a message or waits forever."""


def run(programs, backward=False, cached=False):
    """What each rank computed, and the contributions that came home: {rank: [owner]}, {owner: [reader]}.

    Messages carry tags; ranks go in turns, and stop at a message that has not been sent.
    """
    ranks = len(programs)
    wire, computed = {}, {rank: [] for rank in range(ranks)}
    held = {rank: {("kv", rank): rank} for rank in range(ranks)}
    if cached:
        held = {rank: {("kv", owner): owner for owner in range(ranks)} for rank in range(ranks)}
    home = {rank: [] for rank in range(ranks)}
    coming = {rank: [] for rank in range(ranks)}

    def post(rank, moves):
        for move in moves:
            key = (move.what, move.owner)
            if move.direction == "send":
                if key not in held[rank]:
                    raise Broken(f"rank {rank} sends {key}, which it does not have")
                link = wire.setdefault((rank, move.peer, move.lane), [])
                link.append((key, held[rank].pop(key) if move.what == "sum" else held[rank][key]))
            else:
                coming[rank].append((key, move.peer, move.lane))

    def take(rank, key):
        """Messages of a link come in the order in which the receiver has asked for them."""
        for wanted, peer, lane in list(coming[rank]):
            link = wire.get((peer, rank, lane), [])
            if not link:
                if wanted == key:
                    return False
                continue
            tag, content = link.pop(0)
            if tag != wanted:
                raise Broken(f"rank {rank} asked {peer} for {wanted} and got {tag}")
            coming[rank].remove((wanted, peer, lane))
            held[rank][wanted] = content
        return key in held[rank]

    def go(rank):
        program = programs[rank]
        for step in program.backward if backward else program.forward:
            key = ("kv", step.owner)
            while any(wanted == key for wanted, _, _ in coming[rank]) and not take(rank, key):
                yield
            post(rank, step.moves)
            if not step.computes:
                continue
            if held[rank].get(key) != step.owner:
                raise Broken(f"rank {rank} computes block {step.owner} with {held[rank].get(key)}")
            computed[rank].append(step.owner)
            if backward and step.owner == rank:
                home[rank].append(rank)
            elif backward:
                total = [rank]
                if step.receives_sum:
                    while not take(rank, ("sum", step.owner)):
                        yield
                    total += held[rank].pop(("sum", step.owner))
                held[rank]["sum", step.owner] = total
        if backward:
            post(rank, program.last)
            if any(wanted == ("sum", rank) for wanted, _, _ in coming[rank]) or ("sum", rank) in held[rank]:
                while not take(rank, ("sum", rank)):
                    yield
                home[rank] += held[rank].pop(("sum", rank))

    waiting = {rank: go(rank) for rank in range(ranks)}
    for _ in range(ranks * ranks * 8):
        for rank in list(waiting):
            try:
                next(waiting[rank])
            except StopIteration:
                del waiting[rank]
    if waiting:
        raise Broken(f"ranks {sorted(waiting)} wait forever")
    if any(wire.values()) or any(coming.values()):
        raise Broken("messages that nobody took")
    return computed, home


def check(programs, needed, cached=False):
    ranks = range(len(programs))
    readers = {owner: [reader for reader in ranks if needed[reader][owner]] for owner in ranks}
    owners = {reader: [owner for owner in ranks if needed[reader][owner]] for reader in ranks}
    for backward in (False, True):
        computed, home = run(programs, backward, cached and backward)
        if {rank: sorted(found) for rank, found in computed.items()} != owners:
            raise Broken("blocks computed twice or not at all")
        if backward and {owner: sorted(found) for owner, found in home.items()} != readers:
            raise Broken("contributions lost or counted twice")


@pytest.mark.parametrize(("ranks", "window"), SIZES)
def test_every_block_is_computed_where_it_is_needed_and_every_gradient_comes_home(ranks, window):
    layout = zigzag(4 * ranks, ranks)
    for band in (CAUSAL, FREE, (2, 0), (5, 0), (1, 1), (0, 0)):
        needed = tuple(tuple(needs(layout, reader, owner, band) for owner in range(ranks)) for reader in range(ranks))
        check(ring.programs(ranks, window, needed), needed)
        check(ring.programs(ranks, window, needed, kv_again=False), needed, cached=True)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_set_of_needed_blocks(ranks):
    others = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    for choice in itertools.islice(
        itertools.product([False, True], repeat=len(others)), 0, None, 17 if ranks == 4 else 1
    ):
        wanted = {pair for pair, take in zip(others, choice, strict=True) if take} | {(a, a) for a in range(ranks)}
        needed = tuple(tuple((a, b) in wanted for b in range(ranks)) for a in range(ranks))
        for window in (w for w in range(1, ranks + 1) if ranks % w == 0):
            check(ring.programs(ranks, window, needed), needed)


def test_the_number_of_messages_is_the_least():
    """P - 1 hops of keys and values in each pass, and P - 1 of each sum; an outer hop has the time of a window."""
    for ranks, window in SIZES:
        for program in ring.programs(ranks, window):
            sent = [move for step in program.forward for move in step.moves if move.direction == "send"]
            assert len(sent) == ranks - 1
            back = [*(move for step in program.backward for move in step.moves), *program.last]
            assert sum(move.direction == "send" and move.what == "sum" for move in back) == ranks - 1
            for number, step in enumerate(program.forward):
                for move in step.moves:
                    if move.direction == "receive":
                        used = next(i for i, each in enumerate(program.forward) if each.owner == move.owner)
                        assert used - number == (window if move.lane else 1)
                        assert window in (1, ranks) or (move.lane == 1) == (
                            move.peer // window != program.rank // window
                        )


def mutations(programs):
    """Programs that are wrong in one place."""

    def changed(rank, backward):
        return (*programs[:rank], dataclasses.replace(programs[rank], backward=backward), *programs[rank + 1 :])

    for rank, program in enumerate(programs):
        for number, step in enumerate(program.backward):
            before, after = program.backward[:number], program.backward[number + 1 :]
            if step.computes:
                yield changed(rank, (*before, dataclasses.replace(step, computes=False), *after))
            if step.receives_sum:
                yield changed(rank, (*before, dataclasses.replace(step, receives_sum=False), *after))
            for index, move in enumerate(step.moves):
                rest = (*step.moves[:index], *step.moves[index + 1 :])
                yield changed(rank, (*before, dataclasses.replace(step, moves=rest), *after))
                short = move._replace(peer=(move.peer - 1) % len(programs))
                moves = (*step.moves[:index], short, *step.moves[index + 1 :])
                yield changed(rank, (*before, dataclasses.replace(step, moves=moves), *after))


@pytest.mark.parametrize(("ranks", "window"), [(2, 1), (3, 1), (4, 2), (6, 3)])
def test_the_oracle_sees_every_mutation(ranks, window):
    programs = ring.programs(ranks, window)
    count = 0
    for mutated in mutations(programs):
        count += 1
        with pytest.raises(Broken):
            check(mutated, ((True,) * ranks,) * ranks)
    assert count > 5 * ranks


def test_a_window_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="window of 3 ranks does not divide a ring of 4 ranks"):
        ring.programs(4, 3)
