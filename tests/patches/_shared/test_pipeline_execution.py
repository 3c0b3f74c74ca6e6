"""What a session keeps of schedules; what is executed is in tests/training."""

from __future__ import annotations

import torch

from mindspeed_lite.engine import Context, Report, Session, Settings
from mindspeed_lite.patches._shared.data_parallel_sync import sync_plan
from mindspeed_lite.patches._shared.pipeline_execution import ExecutorState, PlannedStep, listed
from mindspeed_lite.pipeline import orders
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.program import compile_program


def session():
    settings = Settings({})
    return Session(settings, Context(settings, "cpu", {}), Report({}, "cpu"))


def planned(name, rank, *shape):
    schedule = orders.build(name, PipelineShape(*shape))
    program = compile_program(schedule, rank)
    return PlannedStep(schedule, program, sync_plan(program.steps, schedule.num_chunks, rank))


def test_megatrons_window_is_the_warmup_and_one():
    """Megatron: the forward's number modulo (warm-up forwards + 1)."""
    for rank in range(3):
        places = [*planned("1f1b", rank, 3, 6).place_in_window.values()]
        assert places == [number % (3 - rank) for number in range(6)]
    # All in the warm-up: there is one window.
    assert [*planned("1f1b", 0, 4, 2).place_in_window.values()] == [0, 1]
    interleaved = [*planned("interleaved", 1, 2, 4, 2).place_in_window.values()]
    assert interleaved == [number % 3 for number in range(8)]


def test_what_is_kept_of_a_model_goes_with_it_and_ends_with_the_session():
    here = session()
    state = ExecutorState(here)
    model = torch.nn.Linear(2, 2)
    assert state.delayed_of(model) is state.delayed_of(model) and len(state.delayed) == 1
    del model
    assert len(state.delayed) == 0 and state.is_on
    here.end()
    assert not state.is_on


def test_one_model_is_a_list_of_one():
    assert listed(3) == [3] and listed([3, 4]) == [3, 4]
