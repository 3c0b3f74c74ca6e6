"""When Megatron's combined schedule can run, and what a user changes where it cannot."""

from __future__ import annotations

import pytest

from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches import delay_wgrad_compute, moe_fb_overlap
from mindspeed_lite.patches._shared import combined_schedule

MODEL = {
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "bf16": True,
    "overlap_moe_expert_parallel_comm": False,
}


def context(**args):
    return Context(Settings({"moe_fb_overlap": True}), "cpu", {}, {**MODEL, **args})


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
        ({"pipeline_model_parallel_size": 2}, "--num-virtual-stages-per-pipeline-rank 2"),
        ({"recompute_granularity": "full"}, "--recompute-granularity full"),
        ({"recompute_modules": ["moe"]}, "--recompute-modules moe"),
        ({"bf16": False}, "--bf16"),
        ({"moe_shared_expert_overlap": True}, "say only one"),
        ({"mtp_num_layers": 2}, "--mtp-num-layers"),
    ],
)
def test_when_it_is_skipped(args, text):
    (reason,) = combined_schedule.why_not(context(**args))
    assert text in reason
    assert [*moe_fb_overlap.FEATURE.condition(context(**args))] == [reason]
    (reason,) = delay_wgrad_compute.FEATURE.condition(context(**args))
    assert "--overlap-moe-expert-parallel-comm is off" in reason


def test_one_expert_a_rank_wants_a_release_that_keeps_its_input():
    settings = Settings({"moe_fb_overlap": True})
    for release, count in (("0.16.1", 1), ("0.17.0", 0)):
        given = Context(settings, "cpu", {"megatron-core": release}, {**MODEL, "num_experts": 2})
        assert len(combined_schedule.why_not(given)) == count


def test_stages_of_two_chunks_are_enough():
    stages = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    assert combined_schedule.why_not(context(**stages)) == []


def test_dualpipev_brings_its_own_stages():
    settings = Settings({"moe_fb_overlap": True, "schedules_method": "dualpipev"})
    given = Context(settings, "cpu", {}, {**MODEL, "pipeline_model_parallel_size": 2})
    assert combined_schedule.why_not(given) == []
