"""The routing of a ring, followed by tags: every block goes where it is needed, and every sum comes home."""

from __future__ import annotations

import itertools

import pytest

from mindspeed_lite.parallel.context import ring
from mindspeed_lite.parallel.context.layout import CAUSAL, FREE, needs, zigzag

SIZES = [(ranks, window) for ranks in range(1, 13) for window in range(1, ranks + 1) if ranks % window == 0]


def everything(ranks):
    return ((True,) * ranks,) * ranks


def check(needed, window):
    """Follow all ranks through both passes; messages started before a block are there from the next one on."""
    ranks, found = len(needed), ring.route(needed, window)
    keys = {rank: {rank} for rank in range(ranks)}
    sums = {rank: {} for rank in range(ranks)}
    for step in range(ranks + 1):
        arriving = [
            (hop, sums[hop.source].pop(hop.owner) if hop.what == "sum" else None)
            for hop in (*found.sums[step], *(found.kv[step] if step < ranks else ()))
        ]
        for hop, _ in arriving:
            assert hop.what == "sum" or hop.owner in keys[hop.source], f"step {step}: {hop} is not there to be sent"
        for rank in range(ranks if step < ranks else 0):
            owner = found.owners[rank][step]
            if needed[rank][owner]:
                assert owner in keys[rank], f"rank {rank} computes without keys at step {step}"
                sums[rank].setdefault(owner, []).append(rank)
        for hop, content in arriving:
            if hop.what == "kv":
                keys[hop.target].add(hop.owner)
            else:
                sums[hop.target].setdefault(hop.owner, []).extend(content)
    for owner in range(ranks):
        assert sorted(sums[owner].pop(owner)) == [reader for reader in range(ranks) if needed[reader][owner]]
    assert not any(sums.values()), "a sum that did not come home"


@pytest.mark.parametrize(("ranks", "window"), SIZES)
def test_every_block_is_computed_where_it_is_needed_and_every_gradient_comes_home(ranks, window):
    layout = zigzag(4 * ranks, ranks)
    for band in (CAUSAL, FREE, (2, 0), (5, 0), (1, 1), (0, 0)):
        check(tuple(tuple(needs(layout, a, b, band) for b in range(ranks)) for a in range(ranks)), window)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_set_of_needed_blocks(ranks):
    others = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    choices = itertools.product([False, True], repeat=len(others))
    for choice in itertools.islice(choices, 0, None, 17 if ranks == 4 else 1):
        wanted = {pair for pair, take in zip(others, choice, strict=True) if take} | {(a, a) for a in range(ranks)}
        needed = tuple(tuple((a, b) in wanted for b in range(ranks)) for a in range(ranks))
        for window in (w for w in range(1, ranks + 1) if ranks % w == 0):
            check(needed, window)


def test_the_number_of_messages_is_the_least():
    """P - 1 hops of each block's keys and of its sum; an outer hop has the time of a window."""
    for ranks, window in SIZES:
        found = ring.route(everything(ranks), window)
        for hops in (found.kv, found.sums):
            owners = [hop.owner for step in hops for hop in step]
            assert all(owners.count(rank) == ranks - 1 for rank in range(ranks))
        for step, hops in enumerate(found.kv):
            for hop in hops:
                assert found.owners[hop.target].index(hop.owner) - step == (window if hop.lane else 1)
                assert window in (1, ranks) or bool(hop.lane) == (hop.source // window != hop.target // window)


def test_a_window_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="window of 3 ranks does not divide a ring of 4 ranks"):
        ring.route(everything(4), 3)
