"""Both ends of every link carry its messages in one order, and calls that wait for their other end all return."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mindspeed_lite.pipeline.orders import ORDERS, OrderError, PipelineShape, build
from mindspeed_lite.pipeline.program import compile_program
from mindspeed_lite.pipeline.steps import input_message, output_message


def messages_of(transfer):
    return [message for message in transfer if message is not None]


def calls(program):
    return [messages_of(transfer) for group in program.transfers for transfer in group]


def problem(programs):
    """What keeps these programs from ending, if every call waits for all its messages' other ends; None if nothing."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, program in enumerate(programs):
        for message in (message for call in calls(program) for message in call):
            (sent if message.source == rank else received)[message.source, message.target].append(message)
    for link in sent.keys() | received.keys():
        if sent[link] != received[link]:
            return f"the ends of link {link} differ"
    posted, place, waits = set(), [0] * len(programs), [calls(program) for program in programs]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(waits):
            while place[rank] < len(own):
                call = own[place[rank]]
                posted |= {(rank, message) for message in call}
                ends = {(message.target if message.source == rank else message.source, message) for message in call}
                if not ends <= posted:
                    break
                place[rank] += 1
                moved = True
    return None if all(at == len(own) for at, own in zip(place, waits, strict=True)) else "ranks wait for each other"


@st.composite
def programs(draw):
    name = draw(st.sampled_from(sorted(ORDERS)))
    ranks, chunks = draw(st.integers(2, 5)), ORDERS[name].chunks or draw(st.integers(1, 3))
    try:
        schedule = build(name, PipelineShape(ranks, draw(st.integers(1, 12)), chunks))
    except OrderError:
        assume(False)
    lookahead = draw(st.integers(0, 2))
    return schedule, [compile_program(schedule, rank, lookahead) for rank in range(ranks)]


@settings(max_examples=60)
@given(programs())
def test_every_program_ends(drawn):
    schedule, found = drawn
    assert problem(found) is None
    for rank, program in enumerate(found):
        wanted = {
            message
            for step in schedule.steps(rank)
            for message in (input_message(schedule, rank, step), output_message(schedule, rank, step))
            if message is not None and not message.is_local
        }
        carried = [message for call in calls(program) for message in call]
        assert set(carried) == wanted and len(carried) == len(wanted)


@settings(max_examples=60)
@given(programs(), st.data())
def test_messages_that_are_exchanged_at_one_end_are_noticed(drawn, data):
    _, found = drawn
    rank = data.draw(st.integers(0, len(found) - 1))
    program = found[rank]
    places = [
        (index, number, slot, message)
        for index, group in enumerate(program.transfers)
        for number, transfer in enumerate(group)
        for slot, message in zip(transfer._fields, transfer, strict=True)
        if message is not None
    ]
    pairs = [(a, b) for a in places for b in places if a < b and a[2] == b[2] and a[3][:2] == b[3][:2]]
    assume(pairs)
    one, other = data.draw(st.sampled_from(pairs))
    transfers = [list(group) for group in program.transfers]
    for (index, number, slot, _), message in ((one, other[3]), (other, one[3])):
        transfers[index][number] = transfers[index][number]._replace(**{slot: message})
    found[rank] = replace(program, transfers=tuple(map(tuple, transfers)))
    assert problem(found) is not None
