"""What a session keeps of schedules; what is executed is in tests/training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_lite.engine import Context, OptionError, Report, Session, Settings
from mindspeed_lite.patches._shared import pipeline_execution, pipeline_orders
from mindspeed_lite.patches._shared.pipeline_execution import (
    ExecutorState,
    PlannedStep,
    _hand_on,
    _planned,
)
from mindspeed_lite.pipeline import orders
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.program import compile_program
from tests.harness.process_groups import start
from tests.harness.processes import forked


def session():
    settings = Settings({})
    return Session(settings, Context(settings, "cpu", {}), Report({}, "cpu"))


def planned(name, rank, *shape):
    schedule = orders.build(name, PipelineShape(*shape))
    return PlannedStep(schedule, rank, compile_program(schedule, rank))


def test_megatrons_window_is_the_warmup_and_one():
    """Megatron: the forward's number modulo (warm-up forwards + 1)."""
    for rank in range(3):
        places = [*planned("1f1b", rank, 3, 6).place_in_window.values()]
        assert places == [number % (3 - rank) for number in range(6)]
    # All in the warm-up: there is one window.
    assert [*planned("1f1b", 0, 4, 2).place_in_window.values()] == [0, 1]
    interleaved = [*planned("interleaved", 1, 2, 4, 2).place_in_window.values()]
    assert interleaved == [number % 3 for number in range(8)]


def test_what_is_planned_follows_the_flags_of_other_features():
    config = SimpleNamespace(variable_seq_lengths=False, mtp_standalone=False, overlap_p2p_comm=False)
    state, flags = ExecutorState(session()), {"pipeline_schedule": "1f1b", "pipeline_schedule_max_live": 1}

    def plan(**more):
        asked = Settings({**flags, **more})
        return _planned(asked, state, (2, 4, 1, 0), 0, False, config, is_async=False)

    assert plan() is plan() and not plan().recomputed
    bubble, advance = plan(recompute_in_bubble=True), plan(recompute_in_advance=True)
    assert bubble.recomputed and len(advance.recomputed) == 4 and bubble is not advance
    assert not plan().recomputed


@forked("torch")
def test_losses_arrive_on_the_device_of_the_rank_that_gets_them():
    import torch.distributed as dist
    from torch._subclasses import FakeTensorMode

    sent = []
    dist.get_global_rank = lambda group, rank: rank
    dist.send_object_list = lambda given, target, group: sent.append((given, target))
    dist.recv_object_list = lambda given, source, group: given.__setitem__(slice(None), sent[0][0])
    group = SimpleNamespace(size=lambda: 2)
    with FakeTensorMode():
        on_source = [{"lm loss": torch.ones(2, device="cuda:0"), "name": "kept"}], torch.ones((), device="cuda:0")
        at_source = SimpleNamespace(losses=on_source[0], num_tokens=on_source[1])
        dist.get_rank = lambda: 0
        _hand_on(at_source, group, 0)
        (losses, tokens), target = sent[0]
        assert target == 1 and losses[0]["name"] == "kept"
        assert losses[0]["lm loss"].device.type == tokens.device.type == "cpu"
        dist.get_rank = lambda: 1
        at_target = SimpleNamespace(losses=[], num_tokens=torch.zeros((), device="cuda:1"))
        _hand_on(at_target, group, 0)
        assert at_target.losses[0]["lm loss"].device == at_target.num_tokens.device == torch.device("cuda:1")
    assert at_source.losses is on_source[0]


def recompute_session(**flags):
    settings = Settings({"recompute_in_bubble": False, "recompute_in_advance": False, **flags})
    return Session(settings, Context(settings, "cpu", {}), Report({}, "cpu"))


def test_a_step_records_where_a_flag_says_so_into_what_the_checkpoints_read():
    full = SimpleNamespace(recompute_granularity="full")
    here = recompute_session(recompute_in_advance=True)
    # The feature was skipped: nothing has been patched.
    assert not pipeline_orders.recomputes_in_steps(pipeline_orders.active_settings(here))
    made = pipeline_execution.recomputed_units(here)
    found = pipeline_execution._units_of_step(here, full, frozenset({(0, 1)}))
    assert found is made


def test_a_model_that_recomputes_nothing_is_one_line():
    here = recompute_session(recompute_in_bubble=True)
    pipeline_execution.recomputed_units(here)
    with pytest.raises(OptionError, match="set recompute_granularity to 'full'") as error:
        pipeline_execution._units_of_step(here, SimpleNamespace(recompute_granularity=None), frozenset())
    assert "\n" not in str(error.value)


@forked("megatron")
def test_random_numbers_are_restored_and_megatron_is_told_of_a_checkpoint():
    import torch
    from megatron.core.tensor_parallel import random

    start()
    torch.manual_seed(5)
    restored = pipeline_execution._snapshot()
    with random.get_cuda_rng_tracker().fork():
        tracked = torch.randn(2)
    first = torch.randn(3)
    assert not torch.equal(torch.randn(3), first)
    with restored():
        assert random.is_checkpointing()
        with random.get_cuda_rng_tracker().fork():
            assert torch.equal(torch.randn(2), tracked)
        assert torch.equal(torch.randn(3), first)
    assert not random.is_checkpointing()
