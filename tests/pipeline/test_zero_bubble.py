"""The automatic zero-bubble order: complete, within memory, no slower than ZB-H1, near the least time there can be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_lite.pipeline.check import check
from mindspeed_lite.pipeline.costs import peak_live, uniform
from mindspeed_lite.pipeline.orders import OrderError, PipelineShape
from mindspeed_lite.pipeline.simulate import simulate
from mindspeed_lite.pipeline.steps import interleaved_placement, v_placement
from mindspeed_lite.pipeline.zero_bubble import automatic


@settings(max_examples=25)
@given(st.data())
def test_it_is_complete_and_keeps_the_bound(data):
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    chunks = data.draw(st.integers(1, 3))
    bound = data.draw(st.integers(chunks, 2 * ranks * chunks))
    is_v = chunks == 2 and data.draw(st.booleans())
    placement = v_placement(ranks) if is_v else interleaved_placement(ranks, chunks)
    schedule = check(automatic(PipelineShape(ranks, microbatches, chunks), bound, placement))
    assert max(peak_live(schedule, rank) for rank in range(ranks)) <= bound


def test_with_twice_the_memory_the_last_rank_waits_for_its_first_input_alone():
    """ZB-H2: what is left of the bubble is the way of the first micro-batch to the last rank, and 3 % of the step."""
    found = simulate(automatic(PipelineShape(4, 12), 8), uniform(4))
    assert found.makespan == pytest.approx(3 + 12 * 3, rel=0.03)


def test_the_v_placement_halves_the_bubble_at_the_memory_of_1f1b():
    """ZB-V, at equal times: chunks are half as long, and the first rank holds the last stage."""
    halves = uniform(8, 0.5, 0.5, 0.5)
    v = automatic(PipelineShape(4, 12, 2), 8, v_placement(4))
    assert max(peak_live(v, rank) for rank in range(4)) <= 8
    assert simulate(v, halves).makespan < simulate(automatic(PipelineShape(4, 12)), uniform(4)).makespan


def test_less_memory_than_one_micro_batch_needs_is_refused():
    with pytest.raises(OrderError, match="at least 2 chunk activations at once, not 1"):
        automatic(PipelineShape(2, 4, 2), 1)
