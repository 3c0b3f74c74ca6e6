"""What is wrong with a schedule is found, in one line; mutations of right ones are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_lite.pipeline import check
from mindspeed_lite.pipeline.check import ScheduleError
from mindspeed_lite.pipeline.orders import ORDERS, TRAINING_ORDERS, PipelineShape, build
from mindspeed_lite.pipeline.steps import Kind, OverlappedPair, Step, backward, forward, recompute

SHAPE = PipelineShape(3, 6)


def plain(name="1f1b", ranks=3, microbatches=6):
    chunks = ORDERS[name].chunks or 2
    return build(name, PipelineShape(ranks, microbatches, chunks))


def changed(schedule, rank, entries):
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(entries), *schedule.ranks[rank + 1 :]))


def problem(schedule):
    with pytest.raises(ScheduleError) as error:
        check.check(schedule)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"{schedule.name}: ")


@pytest.mark.parametrize("name", TRAINING_ORDERS)
@settings(max_examples=15)
@given(st.data())
def test_a_step_that_is_left_out_is_noticed(name, data):
    schedule = plain(name)
    rank = data.draw(st.integers(0, 2))
    place = data.draw(st.integers(0, len(schedule.ranks[rank]) - 1))
    entries = list(schedule.ranks[rank])
    del entries[place]
    problem(changed(schedule, rank, entries))


@pytest.mark.parametrize(
    ("name", "dropped", "words"),
    [
        ("zb-h1", Kind.WEIGHT_GRAD, "its steps are F BI: want"),
        ("zb-h1", Kind.INPUT_GRAD, "its steps are F W: want"),
        ("1f1b", Kind.BACKWARD, "its steps are F: want"),
        ("1f1b", Kind.FORWARD, "its steps are B: want"),
    ],
)
def test_what_is_missing_is_named(name, dropped, words):
    schedule = plain(name)
    entries = [each for each in schedule.ranks[1] if each != Step(dropped, 0, 2)]
    found = problem(changed(schedule, 1, entries))
    assert found.startswith("rank 1: chunk 0, micro-batch 2: ") and words in found


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ((forward(0, 2),), "F0:2 stands twice"),
        ((Step(Kind.INPUT_GRAD, 0, 2),), "its steps are F B BI: want"),
        ((Step(Kind.WEIGHT_GRAD, 0, 2),), "its steps are F B W: want"),
        ((recompute(0, 2),), "its steps are F B R: want"),
        ((forward(1, 2),), "there is no chunk 1"),
        ((forward(0, 6),), "there is no micro-batch 6"),
        (("F0:2",), "is no step and no overlapped pair, but 'F0:2'"),
        ((None,), "is no step"),
    ],
)
def test_what_is_too_much_is_named(added, words):
    schedule = plain()
    assert words in problem(changed(schedule, 1, (*schedule.ranks[1], *added)))


def test_a_pair_of_one_micro_batch_is_no_pair():
    schedule = plain("interleaved-overlap")
    entries = [
        OverlappedPair(each.forward, backward(*each.forward[1:])) if isinstance(each, OverlappedPair) else each
        for each in schedule.ranks[0]
    ]
    assert "cannot be overlapped with the forward that it needs" in problem(changed(schedule, 0, entries))
    with pytest.raises(ValueError, match="a forward and a backward"):
        OverlappedPair(forward(0, 1), forward(0, 2))


def test_ranks_that_go_through_micro_batches_in_other_orders_are_a_deadlock():
    schedule = plain()
    turned = {kind: dict(zip(range(6), reversed(range(6)), strict=True)) for kind in Kind}
    entries = [Step(kind, chunk, turned[kind][microbatch]) for kind, chunk, microbatch in schedule.ranks[2]]
    assert "deadlock: rank 0 waits at entry 3 (B0:0)" in problem(changed(schedule, 2, entries))


@pytest.mark.parametrize(
    ("placement", "words"),
    [(((0,), (1,), (1,)), "[0, 1, 1]"), (((0,), (1,), (2, 3)), "as many chunks"), ((), "a row for each rank")],
)
def test_a_placement_has_every_stage_once(placement, words):
    assert words in problem(replace(plain(), placement=placement))
    assert "entries for 3 ranks" in problem(replace(plain(), placement=((0,), (1,))))


OWN = """
from mindspeed_lite.pipeline.steps import OverlappedPair, backward, forward, v_placement

def straight(rank, shape):
    for microbatch in range(shape.microbatches):
        yield forward(0, microbatch)
        yield backward(0, microbatch)

def v(rank, shape):
    for microbatch in range(shape.microbatches):
        yield from (forward(0, microbatch), forward(1, microbatch), backward(1, microbatch), backward(0, microbatch))

v.placement, v.chunks = v_placement, 2

def short(rank, shape):
    yield forward(0, 0)

def broken(rank, shape):
    return 1 / 0

def endless(rank, shape):
    while True:
        yield forward(0, 0)

def leaving(rank, shape):
    raise SystemExit

def odd(rank, shape):
    yield OverlappedPair(1, 2)

nothing = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_an_order_of_a_users_own_is_loaded_from_a_file_or_a_module(file, monkeypatch):
    schedule = check.load(f"{file}:straight", SHAPE)
    assert (schedule.num_ranks, schedule.num_chunks, schedule.microbatches) == (3, 1, 6)
    assert check.load(f"{file}:v", SHAPE).placement == ((0, 5), (1, 4), (2, 3))
    monkeypatch.syspath_prepend(str(file.parent))
    assert check.load("own:straight", SHAPE).ranks == schedule.ranks


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{}:short", ["rank 0: chunk 0, micro-batch 1", "its steps are none"]),
        ("{}:broken", ["raises ZeroDivisionError"]),
        ("{}:endless", ["F0:0 stands twice"]),
        ("{}:leaving", ["it raises SystemExit"]),
        ("{}:odd", ["it raises AttributeError"]),
        ("{}.leaving.py:f", ["cannot be imported: it raises SystemExit: 3"]),
        ("{}:nothing", ["no function nothing"]),
        ("{}:absent", ["no function absent"]),
        ("{}", ["module:function or FILE.py:function"]),
        ("/nowhere/own.py:f", ["cannot be imported", "No such file or directory: '/nowhere/own.py'"]),
        ("no.such.module:f", ["cannot be imported", "ModuleNotFoundError"]),
    ],
)
def test_what_cannot_be_loaded_is_told_in_one_line(file, name, words):
    file.with_name(f"{file.name}.leaving.py").write_text("raise SystemExit(3)")
    with pytest.raises(ScheduleError) as error:
        check.load(name.format(file), SHAPE)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
