"""The automatic zero-bubble order: complete, within memory, no slower than ZB-H1, near the least time there can be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_lite.pipeline.check import problems
from mindspeed_lite.pipeline.costs import Costs, peak_live, uniform
from mindspeed_lite.pipeline.orders import OrderError, PipelineShape
from mindspeed_lite.pipeline.simulate import simulate
from mindspeed_lite.pipeline.steps import interleaved_placement, v_placement
from mindspeed_lite.pipeline.zero_bubble import automatic


@settings(max_examples=25)
@given(st.data())
def test_it_is_complete_and_keeps_the_bound(data):
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    chunks = data.draw(st.integers(1, 3))
    is_v = chunks == 2 and data.draw(st.booleans())
    stages = ranks * chunks
    times = st.lists(st.floats(0.0, 4.0), min_size=stages, max_size=stages)
    costs = Costs(data.draw(times), data.draw(times), data.draw(times), message=data.draw(st.floats(0.0, 2.0)))
    bound = data.draw(st.integers(chunks, 2 * stages))
    placement = v_placement(ranks) if is_v else interleaved_placement(ranks, chunks)
    schedule = automatic(PipelineShape(ranks, microbatches, chunks), costs, bound, placement)
    assert not list(problems(schedule, bound))


@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (1.0, 1.2, 0.9)])
def test_with_twice_the_memory_the_last_rank_waits_for_its_first_input_alone(f, b, w):
    """ZB-H2: what is left of the bubble is the way of the first micro-batch to the last rank, and 3 % of the step."""
    ranks, microbatches = 4, 12
    costs = uniform(ranks, f, b, w)
    found = simulate(automatic(PipelineShape(ranks, microbatches), costs, 2 * ranks), costs)
    least = (ranks - 1) * f + microbatches * (f + b + w)
    assert found.makespan == pytest.approx(least, rel=0.03)


def test_the_v_placement_halves_the_bubble_at_the_memory_of_1f1b():
    """ZB-V, at equal times: chunks are half as long, and the first rank holds the last stage."""
    ranks, microbatches = 4, 12
    whole, halves = uniform(ranks), uniform(2 * ranks, 0.5, 0.5, 0.5)
    shape = PipelineShape(ranks, microbatches)
    straight = simulate(automatic(shape, whole), whole)
    v = automatic(PipelineShape(ranks, microbatches, 2), halves, 2 * ranks, v_placement(ranks))
    assert max(peak_live(v, rank) for rank in range(ranks)) <= 2 * ranks
    assert simulate(v, halves).makespan < straight.makespan


def test_less_memory_than_one_micro_batch_needs_is_refused():
    with pytest.raises(OrderError, match="at least 2 chunk activations at once, not 1"):
        automatic(PipelineShape(2, 4, 2), uniform(4), 1)
