"""Ranks that do not agree are found, and ranks that do are not."""

from __future__ import annotations

import dataclasses

import pytest

from mindspeed_lite.dryrun import match
from mindspeed_lite.dryrun.calls import GroupCall

WORLD, LEFT, RIGHT = (0, 1, 2, 3), (0, 1), (2, 3)


def call(group, kind, size=8, at="", **given):
    return GroupCall(group, kind, "float32", size, where=f"script.py:{at}", **given)


def exchange(group, sent, received, at="6"):
    return call(group, "all_to_all_single", sum(sent), at, sent=tuple(sent), received=tuple(received))


def training():
    """Two pipeline stages of two ranks: tensor-parallel sums, a message between stages, experts, a reduction."""
    found = {}
    for rank in WORLD:
        group, is_first = (LEFT, True) if rank in LEFT else (RIGHT, False)
        peer = rank + 2 if is_first else rank - 2
        mine, other = (3, 5) if rank % 2 == 0 else (5, 3)
        found[rank] = [
            call(group, "all_reduce", at="1"),
            call((min(rank, peer), max(rank, peer)), "isend" if is_first else "irecv", 16, "2", peer=peer,
                 is_async=True),
            exchange(group, (4, mine), (4, other)) if rank % 2 == 0 else exchange(group, (mine, 4), (other, 4)),
            call(WORLD, "reduce_scatter_tensor", at="3", is_async=True),
            call(group, "broadcast", at="4", peer=group[0]),
            call(WORLD, "all_gather_into_tensor", at="5"),
        ]  # fmt: skip
    return found


def change(found, rank, place, **fields):
    found[rank][place] = dataclasses.replace(found[rank][place], **fields)


def skips(found):
    del found[1][0]


def other_order(found):
    found[3][4], found[3][5] = found[3][5], found[3][4]


def other_size_of_a_stage(found):
    change(found, 2, 1, size=32)


def never_received(found):
    del found[2][1]


def never_sent(found):
    del found[1][1]


def uneven_experts(found):
    change(found, 0, 2, sent=(4, 9))


def conditional(found):
    found[2].insert(5, call(RIGHT, "all_reduce", at="7"))


def other_type(found):
    change(found, 1, 3, dtype="bfloat16")


def other_root(found):
    change(found, 3, 4, peer=3)


def other_kind(found):
    change(found, 0, 3, kind="all_reduce")


def ends_early(found):
    del found[0][-1]


FAULTS = {
    skips: "all_to_all_single",
    other_order: "waits in all_gather_into_tensor",
    other_size_of_a_stage: "isend of 16",
    never_received: "does not receive it",
    never_sent: "does not send it",
    uneven_experts: "all_to_all_single",
    conditional: "rank 2 waits in all_reduce of 8 float32 in ranks 2, 3 at script.py:7; rank 3 waits in all_gather",
    other_type: "bfloat16",
    other_root: "broadcast",
    other_kind: "reduce_scatter_tensor",
    ends_early: "rank 0 ends without it",
}


def test_ranks_that_agree_match():
    assert match.problems(training()) == []
    # Of a large world only some ranks run.
    assert match.problems({rank: calls for rank, calls in training().items() if rank in (0, 2)}) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_one_line_with_both_places(fault):
    found = training()
    fault(found)
    problems = match.problems(found)
    assert problems and any(FAULTS[fault] in each for each in problems), problems
    assert all("script.py:" in each and each.count("rank") >= 2 and "\n" not in each for each in problems)


def test_blocking_sends_of_both_ranks_wait_for_each_other():
    pair = (0, 1)
    found = {rank: [call(pair, "send", peer=1 - rank), call(pair, "recv", peer=1 - rank)] for rank in pair}
    assert len(match.problems(found)) == 2
    found[1].reverse()
    assert match.problems(found) == []
