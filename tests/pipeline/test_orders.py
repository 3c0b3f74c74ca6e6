"""Published orders, step by step; and against Megatron's own tables."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_lite.pipeline import orders
from mindspeed_lite.pipeline.orders import OrderError, PipelineShape, build
from mindspeed_lite.pipeline.steps import BACKWARDS, Kind, OverlappedPair, v_placement
from tests.harness.processes import forked


def written(schedule, rank):
    return " ".join(map(str, schedule.ranks[rank]))


ONE_CHUNK = {
    ("1f1b", 4, 8): (
        "F0:0 F0:1 F0:2 F0:3 B0:0 F0:4 B0:1 F0:5 B0:2 F0:6 B0:3 F0:7 B0:4 B0:5 B0:6 B0:7",
        "F0:0 F0:1 F0:2 B0:0 F0:3 B0:1 F0:4 B0:2 F0:5 B0:3 F0:6 B0:4 F0:7 B0:5 B0:6 B0:7",
        "F0:0 F0:1 B0:0 F0:2 B0:1 F0:3 B0:2 F0:4 B0:3 F0:5 B0:4 F0:6 B0:5 F0:7 B0:6 B0:7",
        "F0:0 B0:0 F0:1 B0:1 F0:2 B0:2 F0:3 B0:3 F0:4 B0:4 F0:5 B0:5 F0:6 B0:6 F0:7 B0:7",
    ),
    # Fewer micro-batches than ranks.
    ("1f1b", 3, 1): ("F0:0 B0:0",) * 3,
    # Weight gradients lag by the rank.
    ("zb-h1", 3, 4): (
        "F0:0 F0:1 F0:2 BI0:0 W0:0 F0:3 BI0:1 W0:1 BI0:2 W0:2 BI0:3 W0:3",
        "F0:0 F0:1 BI0:0 F0:2 BI0:1 W0:0 F0:3 BI0:2 W0:1 BI0:3 W0:2 W0:3",
        "F0:0 BI0:0 F0:1 BI0:1 F0:2 BI0:2 W0:0 F0:3 BI0:3 W0:1 W0:2 W0:3",
    ),
    ("zb-h1", 2, 1): ("F0:0 BI0:0 W0:0",) * 2,
}
# Figure 4 of Narayanan et al. 2021, for two ranks.
INTERLEAVED_2_4 = (
    "F0:0 F0:1 F1:0 F1:1 F0:2 B1:0 F0:3 B1:1 F1:2 B0:0 F1:3 B0:1 B1:2 B1:3 B0:2 B0:3",
    "F0:0 F0:1 F1:0 B1:0 F1:1 B1:1 F0:2 B0:0 F0:3 B0:1 F1:2 B1:2 F1:3 B1:3 B0:2 B0:3",
)
DUALPIPEV_2_4 = (
    "F0:0 F0:1 F0:2 F1:0 BI1:0 W1:0 F1:1 F0:3+B1:1 F1:2+B0:0 B1:2 F1:3+B0:1 B1:3 B0:2 B0:3",
    "F0:0 F1:0 F0:1 F1:1 F0:2 B1:0 F1:2+B0:0 F0:3+B1:1 F1:3+B0:1 B1:2 B0:2 B1:3 B0:3",
)
DUALPIPEV_2_4_DETACHED = (
    "F0:0 F0:1 F0:2 F1:0 BI1:0 W1:0 F1:1 F0:3+B1:1 F1:2+B0:0 B1:2 F1:3+B0:1 B1:3 BI0:2 W0:2 BI0:3 W0:3",
    "F0:0 F1:0 F0:1 F1:1 F0:2 B1:0 F1:2+B0:0 F0:3+B1:1 F1:3+B0:1 B1:2 B0:2 BI1:3 BI0:3 W1:3 W0:3",
)


@pytest.mark.parametrize("case", ONE_CHUNK, ids=str)
def test_orders_of_one_chunk_are_the_published_ones(case):
    name, ranks, microbatches = case
    schedule = build(name, PipelineShape(ranks, microbatches))
    assert tuple(written(schedule, rank) for rank in range(ranks)) == ONE_CHUNK[case]


def test_interleaved_is_the_published_one():
    schedule = build("interleaved", PipelineShape(2, 4, 2))
    assert tuple(written(schedule, rank) for rank in range(2)) == INTERLEAVED_2_4
    assert schedule.placement == ((0, 2), (1, 3))


def test_overlapped_interleaved_runs_one_more_forward_ahead():
    schedule = build("interleaved-overlap", PipelineShape(2, 4, 2))
    assert written(schedule, 1) == ("F0:0 F0:1 F1:0 F1:1+B1:0 F0:2+B1:1 F0:3+B0:0 F1:2+B0:1 F1:3+B1:2 B1:3 B0:2 B0:3")
    assert written(build("interleaved-overlap", PipelineShape(1, 3)), 0) == "F0:0 F0:1+B0:0 F0:2+B0:1 B0:2"


@pytest.mark.parametrize(
    ("name", "expected"), [("dualpipev", DUALPIPEV_2_4), ("dualpipev-dw-detach", DUALPIPEV_2_4_DETACHED)]
)
def test_dualpipev_is_the_published_one(name, expected):
    schedule = build(name, PipelineShape(2, 4, 2))
    assert tuple(written(schedule, rank) for rank in range(2)) == expected
    assert schedule.placement == v_placement(2) == ((0, 3), (1, 2))


def test_dualpipev_without_weight_gradients_apart_is_the_same_order():
    shape = PipelineShape(4, 10, 2)
    whole, published = build("dualpipev-whole", shape), build("dualpipev", shape)
    assert not whole.has_weight_grads and published.has_weight_grads
    for rank in range(shape.ranks):
        kept = [step for step in published.steps(rank) if step.kind is not Kind.WEIGHT_GRAD]
        assert [step[1:] for step in whole.steps(rank)] == [step[1:] for step in kept]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 7), (4, 10), (8, 20)])
@pytest.mark.parametrize("detach", [False, True])
def test_dualpipev_has_as_many_of_each_as_mindspeeds_table(ranks, microbatches, detach):
    """MindSpeed counts the phases of one rank for 2P stages and twice the micro-batches."""
    schedule = build("dualpipev-dw-detach" if detach else "dualpipev", PipelineShape(ranks, microbatches, 2))
    stages, halves = 2 * ranks, 2 * microbatches
    for rank, entries in enumerate(schedule.ranks):
        kinds = [each if isinstance(each, OverlappedPair) else each.kind for each in entries]
        warmup, behind = stages - 2 - 2 * rank, ranks - rank - 1
        forwards = warmup + 2 * (rank + 1)
        assert kinds[:forwards] == [Kind.FORWARD] * forwards
        middle = [Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.FORWARD] * behind
        assert kinds[forwards : forwards + 3 * behind] == middle
        pairs = sum(isinstance(each, OverlappedPair) for each in kinds)
        assert pairs + (rank == ranks - 1) == halves - 2 * stages + 2 * rank + 2 + behind
        tail = kinds[max(place for place, each in enumerate(kinds) if isinstance(each, OverlappedPair)) + 1 :]
        backwards = [each for each in tail if each in BACKWARDS]
        assert len(backwards) == 2 * (rank + 1) + stages - 2 * rank - 2 - behind
        assert tail.count(Kind.WEIGHT_GRAD) == (ranks if detach else 0)


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
