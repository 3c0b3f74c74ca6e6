"""Megatron's functions as the executor calls them; what they do in training is in tests/training."""

from __future__ import annotations

from types import SimpleNamespace

from tests.harness.processes import forked


def passes(chunks, rank, deallocate=False):
    from megatron.core.pipeline_parallel import schedules

    from mindspeed_lite.patches._shared.data_parallel_sync import sync_plan
    from mindspeed_lite.patches._shared.pipeline_passes import MegatronPasses, TrainingStep
    from mindspeed_lite.pipeline import orders
    from mindspeed_lite.pipeline.orders import PipelineShape

    name = "1f1b" if chunks == 1 else "interleaved"
    schedule = orders.build(name, PipelineShape(2, 2, chunks))
    config = SimpleNamespace(deallocate_pipeline_outputs=deallocate, timers=None, grad_scale_func=None)
    this = TrainingStep(None, [None] * chunks, [SimpleNamespace()] * chunks, config, 2, 1, False, False, None)
    schedules.get_model_type = lambda model: None
    plan = sync_plan(list(schedule.steps(rank)), chunks, rank)
    return MegatronPasses(schedules, this, schedule, rank, plan)


@forked("megatron")
def test_an_output_is_released_where_the_configuration_says_so():
    import torch

    assert not passes(1, 0, False).releases
    output = torch.ones(2, 3)
    here = passes(1, 0, True)
    here.release(output)
    assert here.releases and output.numel() == 1


@forked("megatron")
def test_what_is_handed_over_begins_a_graph_and_outlives_the_release():
    import torch

    weight = torch.ones(3, requires_grad=True)
    output = weight * 2
    here = passes(1, 0, True)
    received = here.hand_over(output)
    here.release(output)
    assert received.is_leaf and received.requires_grad and received.tolist() == [2.0] * 3
    with torch.no_grad():
        assert not here.hand_over(weight * 2).requires_grad


@forked("megatron")
def test_chunks_are_numbered_where_there_are_several_and_the_last_stage_is_the_orders():
    assert passes(1, 1)._vp_stages == [None] and passes(1, 1)._is_last == [True]
    assert passes(2, 0)._vp_stages == [0, 1] and passes(2, 0)._is_last == [False, False]
    assert passes(2, 1)._is_last == [False, True]
