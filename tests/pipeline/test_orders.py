"""Published orders, step by step; and against Megatron's own tables."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_lite.pipeline import orders
from mindspeed_lite.pipeline.orders import OrderError, PipelineShape, build
from mindspeed_lite.pipeline.steps import Kind, v_placement
from tests.harness.processes import forked


def written(schedule, rank):
    return " ".join(map(str, schedule.ranks[rank]))


PUBLISHED = {
    ("1f1b", 4, 8, 1): (
        "F0:0 F0:1 F0:2 F0:3 B0:0 F0:4 B0:1 F0:5 B0:2 F0:6 B0:3 F0:7 B0:4 B0:5 B0:6 B0:7",
        "F0:0 F0:1 F0:2 B0:0 F0:3 B0:1 F0:4 B0:2 F0:5 B0:3 F0:6 B0:4 F0:7 B0:5 B0:6 B0:7",
        "F0:0 F0:1 B0:0 F0:2 B0:1 F0:3 B0:2 F0:4 B0:3 F0:5 B0:4 F0:6 B0:5 F0:7 B0:6 B0:7",
        "F0:0 B0:0 F0:1 B0:1 F0:2 B0:2 F0:3 B0:3 F0:4 B0:4 F0:5 B0:5 F0:6 B0:6 F0:7 B0:7",
    ),
    # Fewer micro-batches than ranks.
    ("1f1b", 3, 1, 1): ("F0:0 B0:0",) * 3,
    # Weight gradients lag by the rank.
    ("zb-h1", 3, 4, 1): (
        "F0:0 F0:1 F0:2 BI0:0 W0:0 F0:3 BI0:1 W0:1 BI0:2 W0:2 BI0:3 W0:3",
        "F0:0 F0:1 BI0:0 F0:2 BI0:1 W0:0 F0:3 BI0:2 W0:1 BI0:3 W0:2 W0:3",
        "F0:0 BI0:0 F0:1 BI0:1 F0:2 BI0:2 W0:0 F0:3 BI0:3 W0:1 W0:2 W0:3",
    ),
    ("zb-h1", 2, 1, 1): ("F0:0 BI0:0 W0:0",) * 2,
    # Figure 4 of Narayanan et al. 2021, for two ranks.
    ("interleaved", 2, 4, 2): (
        "F0:0 F0:1 F1:0 F1:1 F0:2 B1:0 F0:3 B1:1 F1:2 B0:0 F1:3 B0:1 B1:2 B1:3 B0:2 B0:3",
        "F0:0 F0:1 F1:0 B1:0 F1:1 B1:1 F0:2 B0:0 F0:3 B0:1 F1:2 B1:2 F1:3 B1:3 B0:2 B0:3",
    ),
    ("dualpipev", 2, 4, 2): (
        "F0:0 F0:1 F0:2 F1:0 BI1:0 W1:0 F1:1 F0:3+B1:1 F1:2+B0:0 B1:2 F1:3+B0:1 B1:3 B0:2 B0:3",
        "F0:0 F1:0 F0:1 F1:1 F0:2 B1:0 F1:2+B0:0 F0:3+B1:1 F1:3+B0:1 B1:2 B0:2 B1:3 B0:3",
    ),
    ("dualpipev-dw-detach", 2, 4, 2): (
        "F0:0 F0:1 F0:2 F1:0 BI1:0 W1:0 F1:1 F0:3+B1:1 F1:2+B0:0 B1:2 F1:3+B0:1 B1:3 BI0:2 W0:2 BI0:3 W0:3",
        "F0:0 F1:0 F0:1 F1:1 F0:2 B1:0 F1:2+B0:0 F0:3+B1:1 F1:3+B0:1 B1:2 B0:2 BI1:3 BI0:3 W1:3 W0:3",
    ),
}


@pytest.mark.parametrize("case", PUBLISHED, ids=str)
def test_orders_are_the_published_ones(case):
    name, ranks, microbatches, chunks = case
    schedule = build(name, PipelineShape(ranks, microbatches, chunks))
    assert tuple(written(schedule, rank) for rank in range(ranks)) == PUBLISHED[case]


def test_chunks_are_placed_one_after_the_other_or_in_a_v():
    assert build("interleaved", PipelineShape(2, 4, 2)).placement == ((0, 2), (1, 3))
    assert build("dualpipev", PipelineShape(2, 4, 2)).placement == v_placement(2) == ((0, 3), (1, 2))


def test_an_evaluation_has_forwards_alone():
    assert written(build("forward-only", PipelineShape(2, 2, 2)), 0) == "F0:0 F0:1 F1:0 F1:1"
    schedule = build("forward-only-v", PipelineShape(2, 3, 2))
    assert written(schedule, 0) == "F0:0 F0:1 F1:0 F0:2 F1:1 F1:2"
    assert written(schedule, 1) == "F0:0 F1:0 F0:1 F1:1 F0:2 F1:2"
    assert schedule.is_forward_only


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("zigzag", PipelineShape(2, 4), ["zigzag", "1f1b"]),
        ("1f1b", PipelineShape(2, 4, 2), ["1 model chunk", "2"]),
        ("1f1b", PipelineShape(0, 4), ["at least 1"]),
        ("interleaved", PipelineShape(4, 8), ["2 model chunks"]),
        ("interleaved", PipelineShape(1, 8, 2), ["one rank"]),
        ("interleaved", PipelineShape(4, 2, 2), ["4 (ranks)", "2 (micro-batches"]),
        ("interleaved", PipelineShape(4, 8, 2, group=3), ["not 3"]),
        ("interleaved", PipelineShape(4, 10, 2), ["last group", "2 micro-batches"]),
        ("dualpipev", PipelineShape(4, 6, 2), ["at least 7", "6"]),
        ("dualpipev", PipelineShape(1, 6, 2), ["2 pipeline ranks"]),
    ],
)
def test_an_order_that_does_not_exist_for_a_shape_is_refused(name, shape, words):
    with pytest.raises(OrderError) as error:
        build(name, shape)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@forked("megatron")
def test_tables_and_warm_ups_are_megatrons():
    import inspect

    from megatron.core.pipeline_parallel import schedules

    takes = inspect.signature(schedules.get_pp_rank_microbatches).parameters
    for ranks, microbatches, chunks, group in ((2, 4, 2, 2), (4, 8, 3, 4), (2, 6, 2, 3), (2, 5, 2, 3), (4, 12, 2, 6)):
        shape = PipelineShape(ranks, microbatches, chunks, group)
        megatrons = schedules.get_schedule_table(microbatches, chunks, group)
        assert [(microbatch, chunk) for chunk, microbatch in orders.table(shape)] == megatrons
        for rank in range(ranks) if "p2p_communicator" in takes else ():
            place = SimpleNamespace(size=lambda n=ranks: n, rank=lambda r=rank: r)
            communicator = SimpleNamespace(pp_group=place, virtual_pipeline_model_parallel_size=chunks)
            for overlaps, name in ((False, "interleaved"), (True, "interleaved-overlap")):
                total, _, ahead, _ = schedules.get_pp_rank_microbatches(
                    microbatches, chunks, group, False, overlaps, communicator
                )
                kinds = [each for each in build(name, shape).ranks[rank]]
                first = next((p for p, each in enumerate(kinds) if getattr(each, "kind", None) is not Kind.FORWARD))
                # Without overlap the first backward follows the forward that is one more than those ahead.
                assert first == min(ahead + (not overlaps), total), (name, shape, rank)
