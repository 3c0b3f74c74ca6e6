"""The simulator: against closed formulas, for messages, memory and deadlock, and for any order and durations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mindspeed_lite.pipeline import orders
from mindspeed_lite.pipeline.check import check
from mindspeed_lite.pipeline.costs import Costs, held, peak_bytes, peak_live, uniform
from mindspeed_lite.pipeline.orders import OrderError, PipelineShape, build
from mindspeed_lite.pipeline.simulate import DeadlockError, simulate
from mindspeed_lite.pipeline.steps import BACKWARDS, Kind, backward, forward, steps_of

TIMES = st.floats(0.1, 10.0)


# Order -> chunks, and the idle time of a rank as its authors give it, for P - 1 = 1. A backward is b + w.
IDLE = {
    "1f1b": (1, lambda f, b, w: f + b + w),
    "interleaved": (2, lambda f, b, w: f + b + w),
    # F + B - W; longer weight gradients fill no more than the gap.
    "zb-h1": (1, lambda f, b, w: max(f, b, f + b - w)),
    # F&B + B - W, and 3 W with weight gradients detached: where F and B take the same, and W no longer.
    "dualpipev": (2, lambda f, b, w: (f + b + w) + (b + w) - w),
    "dualpipev-dw-detach": (2, lambda f, b, w: (f + b + w) + (b + w) - 3 * w),
}


@pytest.mark.parametrize("name", IDLE)
@settings(max_examples=40)
@given(st.integers(2, 6), st.integers(0, 4), TIMES, TIMES, TIMES)
def test_ranks_idle_as_published(name, ranks, more, f, b, w):
    chunks, wanted = IDLE[name]
    f, b, w = (f, f, min(f, w)) if "dualpipev" in name else (f, b, w)
    microbatches = ranks * (1 + more) if name == "interleaved" else 2 * ranks + more
    schedule = build(name, PipelineShape(ranks, microbatches, chunks))
    found = simulate(schedule, uniform(ranks * chunks, f, b, w))
    assert [found.idle(rank) for rank in range(ranks)] == pytest.approx([(ranks - 1) * wanted(f, b, w)] * ranks)


@pytest.mark.parametrize(
    ("name", "chunks", "microbatches", "held"),
    [
        ("1f1b", 1, 8, [4, 3, 2, 1]),
        ("1f1b", 1, 2, [2, 2, 2, 1]),
        ("zb-h1", 1, 8, [4, 4, 4, 4]),
        ("dualpipev", 2, 12, [9, 9, 9, 9]),
        ("dualpipev-dw-detach", 2, 12, [9, 9, 9, 9]),
        ("forward-only", 1, 8, [0, 0, 0, 0]),
    ],
)
def test_chunk_activations_that_ranks_hold(name, chunks, microbatches, held):
    schedule = build(name, PipelineShape(4, microbatches, chunks))
    assert [peak_live(schedule, rank) for rank in range(4)] == held


@st.composite
def shapes(draw):
    ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    return PipelineShape(ranks, draw(st.integers(1, 14)), chunks, draw(st.sampled_from([0, 0, ranks, ranks + 1])))


@st.composite
def scheduled(draw):
    """Any published order for any shape that it has."""
    name, shape = draw(st.sampled_from(sorted(orders.ORDERS))), draw(shapes())
    chunks = orders.ORDERS[name].chunks or shape.chunks
    try:
        return build(name, replace(shape, chunks=chunks))
    except OrderError:
        assume(False)


def drawn_costs(draw, stages):
    times = st.lists(st.floats(0.0, 5.0), min_size=stages, max_size=stages)
    return Costs(
        draw(times), draw(times), draw(times), message=draw(st.floats(0.0, 3.0)), pair=draw(st.floats(0.5, 1.2))
    )


@settings(max_examples=60)
@given(scheduled(), st.data())
def test_every_order_ends_for_any_durations_with_all_that_a_step_needs_before_it(schedule, data):
    costs = drawn_costs(data.draw, schedule.num_stages)
    found = simulate(check(schedule), costs)
    ended = {
        (rank, step): timed.end
        for rank, run in enumerate(found.ranks)
        for timed in run
        for step in steps_of(timed.entry)
    }
    for rank, run in enumerate(found.ranks):
        before = 0.0
        for timed in run:
            assert timed.begin >= before
            before = timed.end
            for step in steps_of(timed.entry):
                for needed in schedule.predecessors(rank, step):
                    lag = 0.0 if needed.is_local else costs.message
                    assert ended[needed.source, needed.step] + lag <= timed.begin + 1e-9
        assert found.busy(rank) == pytest.approx(
            sum(costs.seconds(schedule, rank, entry) for entry in schedule.ranks[rank])
        )
        assert 0 <= found.exposed(rank) <= found.idle(rank) + 1e-9
    kinds = [step.kind for rank in range(schedule.num_ranks) for step in schedule.steps(rank)]
    units = schedule.num_stages * schedule.microbatches
    assert kinds.count(Kind.FORWARD) == units
    assert sum(map(kinds.count, BACKWARDS)) == (0 if schedule.is_forward_only else units)


def test_a_rank_that_could_not_begin_sooner_waits_for_the_message_alone():
    schedule = build("1f1b", PipelineShape(2, 1))
    found = simulate(schedule, uniform(2, message=0.25))
    assert [(timed.begin, timed.end) for timed in found.ranks[1]] == [(1.25, 2.25), (2.25, 4.25)]
    assert (found.exposed(1), found.exposed(0)) == (0.25, 0.25)
    assert found.makespan == 6.5
    assert found.idle(1) == 3.5 and found.bubble == pytest.approx(7 / 13)


def test_messages_of_a_link_follow_each_other():
    schedule = build("1f1b", PipelineShape(2, 2))
    found = simulate(schedule, uniform(2, message=4.0))
    # The activations leave at 1 and 2; the second has the link from 5 on.
    arrivals = [timed.begin for timed in found.ranks[1] if timed.entry.kind is Kind.FORWARD]
    assert arrivals == [5.0, 9.0]


def test_ranks_that_wait_for_each_other_are_told():
    shape = PipelineShape(2, 2)

    def order(rank, shape):
        # The first rank wants the gradient of 0 before it runs 1, and the second runs 1 first.
        yield from (
            (forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1))
            if rank == 0
            else (forward(0, 1), backward(0, 1), forward(0, 0), backward(0, 0))
        )

    with pytest.raises(DeadlockError, match=r"crossed: deadlock: rank 0 waits at entry 1 \(B0:0\) for B0:0 of rank 1"):
        simulate(orders.from_function("crossed", order, shape), uniform(2))


def test_bytes_are_those_of_what_is_held():
    costs = Costs(
        [1.0] * 2, [1.0] * 2, [1.0] * 2,
        activation_bytes=[100, 10], input_bytes=[7, 3], backward_bytes=[5, 50],
    )  # fmt: skip
    schedule = build("zb-h1", PipelineShape(2, 3))
    # F, F, BI: two are held, and the backward's own; W: one has been freed, and weight gradients wait.
    assert [each.bytes(costs, (0,)) for each in held(schedule, 0)][:4] == [100, 200, 205, 200]
    assert peak_bytes(schedule, 0, costs) == 205
    # F BI F BI: the first one's weight gradients wait for the second backward.
    assert [each.bytes(costs, (1,)) for each in held(schedule, 1)][:4] == [10, 60, 20, 70]


def test_a_queue_for_both_directions_delays_what_crosses():
    schedule = build("1f1b", PipelineShape(2, 2))
    for message, apart, queued in ((1.0, [0, 1, 6, 9], [0, 1, 6, 9]), (4.0, [0, 1, 12, 16], [0, 1, 13, 17])):
        costs = uniform(2, message=message)
        # The second activation arrives at 9 in the second case, and the first gradient is ready at 8.
        for one_queue, wanted in ((False, apart), (True, queued)):
            first = simulate(schedule, replace(costs, one_queue=one_queue)).ranks[0]
            assert [each.begin for each in first] == wanted
