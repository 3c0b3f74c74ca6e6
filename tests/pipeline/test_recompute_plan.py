"""Recomputation as steps: which units, where they stand, and what that does to memory and time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_lite.pipeline.check import check
from mindspeed_lite.pipeline.costs import peak_live, uniform
from mindspeed_lite.pipeline.orders import OrderError, PipelineShape, build
from mindspeed_lite.pipeline.recompute_plan import in_advance, in_bubble
from mindspeed_lite.pipeline.simulate import simulate
from mindspeed_lite.pipeline.steps import BACKWARDS, Kind

SHAPES = st.builds(
    lambda ranks, rounds, chunks: PipelineShape(ranks, ranks * rounds, chunks),
    st.integers(2, 4), st.integers(1, 4), st.integers(2, 3),
)  # fmt: skip


def recomputed(schedule, rank):
    return [step for step in schedule.steps(rank) if step.kind is Kind.RECOMPUTE]


@settings(max_examples=30)
@given(SHAPES)
def test_in_advance_a_recomputation_stands_right_before_each_backward_but_those_of_the_last_stage(shape):
    plain = build("interleaved", shape)
    schedule = check(in_advance(plain))
    for rank, entries in enumerate(schedule.ranks):
        assert tuple(each for each in entries if each.kind is not Kind.RECOMPUTE) == plain.ranks[rank]
        for place, each in enumerate(entries):
            if each.kind in BACKWARDS:
                has_own = schedule.stage(rank, each.chunk) != schedule.num_stages - 1
                assert (entries[place - 1] == (Kind.RECOMPUTE, each.chunk, each.microbatch)) == has_own


def test_in_advance_recomputation_runs_while_gradients_are_waited_for():
    """Against recomputation inside the backward the step is shorter by what one fills of the gaps."""
    schedule = build("interleaved", PipelineShape(4, 8, 2))
    costs = replace(uniform(8), recomputes=True)
    lazy, advanced = simulate(schedule, costs), simulate(in_advance(schedule), costs)
    assert advanced.makespan < lazy.makespan
    assert advanced.busy(0) == lazy.busy(0) == pytest.approx(16 * 4)


@pytest.mark.parametrize(
    ("ranks", "excess"), [(4, (3, 1, 0, 0)), (8, (7, 5, 3, 1, 0, 0, 0, 0))], ids=["4 ranks", "8 ranks"]
)
def test_with_warm_up_alone_as_many_are_recomputed_as_ripipe_says(ranks, excess):
    """Ranks times chunks are held: 2(P - r - 1) + (V - 1)P + 1 would be, where one group follows the first."""
    schedule = build("interleaved", PipelineShape(ranks, 2 * ranks, 2))
    found = [recomputed(in_bubble(schedule), rank) for rank in range(ranks)]
    assert tuple(map(len, found)) == excess
    assert {step.chunk for steps in found for step in steps} <= {0}


@settings(max_examples=30)
@given(SHAPES, st.data())
def test_in_the_bubble_every_rank_stays_within_the_bound(shape, data):
    plain = build("interleaved", shape)
    bound = data.draw(st.integers(1, plain.num_stages + 3))
    schedule = check(in_bubble(plain, bound))
    assert max(peak_live(schedule, rank) for rank in range(shape.ranks)) <= bound
    for rank, entries in enumerate(schedule.ranks):
        assert tuple(each for each in entries if each.kind is not Kind.RECOMPUTE) == plain.ranks[rank]


def test_in_the_bubble_recomputation_costs_less_than_its_time():
    shape = PipelineShape(4, 8, 2)
    costs, plain = uniform(8), build("interleaved", shape)
    schedule = in_bubble(plain)
    before, after = simulate(plain, costs), simulate(schedule, costs)
    assert max(peak_live(schedule, rank) for rank in range(4)) == 8 < peak_live(plain, 0) == 11
    assert len(recomputed(schedule, 0)) == 3
    assert after.makespan - before.makespan < 3 * costs.forward[0]


def test_weight_gradients_of_their_own_are_refused():
    with pytest.raises(OrderError, match="zb-h1"):
        in_bubble(build("zb-h1", PipelineShape(2, 4)))
