"""What a rank executes: no two ranks ever wait for each other, however calls block and communicators order them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from mindspeed_lite.pipeline import orders, steps, zero_bubble
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.program import Joining, PassWork, Program, Transfer, compile_program
from mindspeed_lite.pipeline.steps import Kind, Message, Schedule, backward, forward


def schedules() -> Iterator[Schedule]:
    for ranks, microbatches in itertools.product((2, 3, 4), (1, 4, 7)):
        for name in orders.ORDERS:
            for chunks, group in ((1, 0), (2, 0), (2, ranks + 1), (3, 0)):
                try:
                    yield orders.build(name, PipelineShape(ranks, microbatches, chunks, group))
                except orders.OrderError:
                    continue
        for chunks, placement in ((1, None), (2, None), (2, steps.v_placement(ranks))):
            shape = PipelineShape(ranks, microbatches, chunks)
            if microbatches < 8 and ranks < 4:
                yield zero_bubble.automatic(shape, placement=placement)


SCHEDULES = [*schedules()]


def programs(schedule: Schedule, lookahead: int, joining: Joining, pairs: bool = False) -> list[Program]:
    return [compile_program(schedule, rank, lookahead, joining, pairs) for rank in range(schedule.num_ranks)]


def messages_of(transfer: Transfer) -> set[Message]:
    return {each for each in transfer if each is not None}


def calls_of(each: Program) -> list[Transfer]:
    return [action for action in each if isinstance(action, Transfer)]


def is_run_by_rendezvous(ranks: list[Program]) -> bool:
    """Whether all calls return if each blocks until the other ends of all its messages have been issued."""
    calls = [calls_of(each) for each in ranks]
    done = [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        issued = [
            {message for transfer in own[: count + 1] for message in messages_of(transfer)}
            for own, count in zip(calls, done, strict=True)
        ]
        for rank, own in enumerate(calls):
            if done[rank] < len(own) and all(
                message in issued[message.source] and message in issued[message.target]
                for message in messages_of(own[done[rank]])
            ):
                done[rank] += 1
                moved = True
    return done == [len(own) for own in calls]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("lookahead", "joining"), [(0, "all"), (1, "one way"), (3, "none"), (2, "all")])
def test_every_call_returns_where_calls_block(lookahead: int, joining: Joining, pairs: bool) -> None:
    for schedule in SCHEDULES:
        assert is_run_by_rendezvous(programs(schedule, lookahead, joining, pairs)), (schedule.name, schedule.num_ranks)


@pytest.mark.parametrize(("lookahead", "joining"), [(0, "all"), (1, "one way")])
def test_both_ends_of_a_pair_of_ranks_issue_messages_in_one_order(lookahead: int, joining: Joining) -> None:
    for schedule in SCHEDULES:
        ranks = programs(schedule, lookahead, joining)
        numbers = [
            {message: number for number, transfer in enumerate(calls_of(each)) for message in messages_of(transfer)}
            for each in ranks
        ]
        for one, other in itertools.combinations(range(schedule.num_ranks), 2):
            shared = sorted(
                numbers[one].keys() & numbers[other].keys(), key=lambda each: (numbers[one][each], numbers[other][each])
            )
            order = [numbers[other][each] for each in shared]
            assert order == sorted(order)


@pytest.mark.parametrize("pairs", [False, True])
def test_messages_are_sent_after_their_step_received_before_theirs(pairs: bool) -> None:
    found = 0
    for schedule in SCHEDULES:
        for rank in range(schedule.num_ranks):
            compiled = compile_program(schedule, rank, 1, "one way", pairs)
            works = [action for action in compiled if isinstance(action, PassWork)]
            assert [step for work in works for step in work.steps] == list(schedule.steps(rank))
            done, issued = 0, {}
            for action in compiled:
                if isinstance(action, Transfer):
                    issued |= dict.fromkeys(messages_of(action), done)
                else:
                    done += 1
            for index, work in enumerate(works):
                for message in work.takes:
                    assert message is None or message.is_local or issued.pop(message) <= index
                for message in work.gives:
                    assert message is None or message.is_local or issued.pop(message) == index + 1
                if len(work.steps) > 1:
                    assert [each.kind for each in work.steps] == [Kind.FORWARD, Kind.BACKWARD]
                    found += 1
            assert not issued
    assert (found > 100) == pairs


def test_1f1b_has_megatrons_calls() -> None:
    """Send and receive of neighbours' exchange are one call, as `send_forward_recv_backward` is."""
    compiled = compile_program(orders.build("1f1b", PipelineShape(2, 2)), 0)
    names = [action if isinstance(action, Transfer) else str(action.steps[0]) for action in compiled]
    assert names == [
        "F0:0",
        Transfer(to_next=Message(0, 1, forward(0, 0))),
        "F0:1",
        Transfer(to_next=Message(0, 1, forward(0, 1)), from_prev=Message(1, 0, backward(0, 0))),
        "B0:0",
        Transfer(from_prev=Message(1, 0, backward(0, 1))),
        "B0:1",
    ]


def test_only_neighbours_exchange_tensors() -> None:
    order = forward(0, 0), backward(0, 0)
    schedule = Schedule("own", 1, ((0,), (2,), (1,), (3,)), (order,) * 4)
    with pytest.raises(ValueError, match="only neighbours in the ring"):
        compile_program(schedule, 0)
