"""Records of an executor: read, compared with a schedule, and made into costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mindspeed_lite.json_file import JsonFileError
from mindspeed_lite.pipeline import trace
from mindspeed_lite.pipeline.costs import Costs, uniform
from mindspeed_lite.pipeline.orders import PipelineShape, build
from mindspeed_lite.pipeline.simulate import simulate
from mindspeed_lite.pipeline.steps import steps_of
from mindspeed_lite.pipeline.trace import TraceError

SCHEDULE = build("zb-h1", PipelineShape(2, 3))


def lines(schedule=SCHEDULE, begin=0.0, costs=None):
    run = simulate(schedule, costs or uniform(schedule.num_stages))
    return [
        json.dumps(
            {
                "rank": rank, "kind": step.kind.value, "chunk": step.chunk, "microbatch": step.microbatch,
                "begin": begin + timed.begin, "end": begin + timed.end,
            }
        )
        for rank, entries in enumerate(run.ranks)
        for timed in entries
        for step in steps_of(timed.entry)
    ]  # fmt: skip


@pytest.fixture
def file(tmp_path):
    return tmp_path / "trace.jsonl"


def executed(schedule, file, **costs):
    """A simulated training step, written as a record and read again."""
    file.write_text("\n".join(lines(schedule, 100.0, **costs)))
    (step,) = trace.training_steps(trace.read(file), schedule)
    return step


def test_whole_training_steps_are_told_apart(file):
    file.write_text("\n".join([*lines(), *lines(begin=20.0), *lines(begin=40.0)[:3]]) + "\n\n")
    found = trace.training_steps(trace.read(file), SCHEDULE)
    wanted = simulate(SCHEDULE, uniform(2))
    assert [each.makespan for each in found] == [wanted.makespan] * 2
    assert found[1].bubble == pytest.approx(wanted.bubble)


def test_of_a_folder_one_file_for_each_pipeline_rank_counts(tmp_path):
    for number, rank in enumerate((0, 0, 1, 1)):
        mine = [line for line in lines() if json.loads(line)["rank"] == rank]
        (tmp_path / f"rank{number}.jsonl").write_text("\n".join(mine))
    assert len(trace.read(tmp_path)) == 18


def test_steps_and_messages_of_a_run_explain_its_time(file):
    costs = Costs([1.0, 2.0], [3.0, 1.5], [0.5, 1.0], message=0.5)
    found = trace.median_costs([executed(SCHEDULE, file, costs=costs)])
    assert found.message == pytest.approx(0.5)
    assert simulate(SCHEDULE, found).makespan == pytest.approx(simulate(SCHEDULE, costs).makespan)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_pairs_that_ran_one_after_the_other_are_simulated_so(share, file):
    schedule = build("dualpipev", PipelineShape(2, 4, 2))
    planned = schedule if share < 1 else schedule.one_by_one()
    records = [
        trace.ExecutedStep(rank, step, timed.begin, timed.end)
        for rank, entries in enumerate(simulate(planned, replace(uniform(4), pair=share)).ranks)
        for timed in entries
        for step in steps_of(timed.entry)
    ]
    (step,) = trace.training_steps(records, schedule)
    assert step.schedule == planned


def test_a_backward_measured_as_a_whole_is_halved():
    schedule = build("1f1b", PipelineShape(1, 2))
    found = trace.median_costs([simulate(schedule, uniform(1, 3.0, 1.0, 2.0))])
    assert (found.forward[0], found.input_grad[0], found.weight_grad[0]) == (3.0, 1.5, 1.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no records"),
        ("not json", "line 1: is not JSON"),
        ('{"rank": 0}', "line 1: lacks kind"),
        (lines()[0].replace('"F"', '"Z"'), "line 1: kind: want"),
        (lines()[0].replace('"rank": 0', '"rank": 7'), "rank 7"),
        ("\n".join(lines()[:4]), "no whole training step: 4 of rank 0's 9 steps"),
        ("\n".join([lines()[1], lines()[0], *lines()[2:]]), "rank 0 ran F0:1 as step 0 where zb-h1 has F0:0"),
    ],
)
def test_what_is_no_trace_of_the_schedule_is_told(file, text, words):
    file.write_text(text)
    with pytest.raises((TraceError, JsonFileError)) as error:
        trace.training_steps(trace.read(file), SCHEDULE)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_told(file):
    with pytest.raises(JsonFileError, match="cannot be read"):
        trace.read(file)
    with pytest.raises(JsonFileError, match=r"no \*\.jsonl"):
        trace.read(file.parent)
