"""`--moe-fb-overlap`: what it says to Megatron, and when it says nothing."""

from __future__ import annotations

from mindspeed_lite.engine import Context, Settings, automatic_reasons
from mindspeed_lite.patches import delay_wgrad_compute
from mindspeed_lite.patches.moe_fb_overlap import FEATURE

MODEL = {
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "bf16": True,
    "overlap_moe_expert_parallel_comm": False,
}


def context(**args):
    return Context(Settings({"moe_fb_overlap": True}), "cpu", {}, {**MODEL, **args})


def test_it_says_megatrons_own_flag_and_delays_weight_gradients():
    assert list(FEATURE.condition(context())) == []
    assert FEATURE.arguments(context()) == {"overlap_moe_expert_parallel_comm": True}
    delayed = delay_wgrad_compute.FEATURE
    assert delayed.is_enabled(context().settings) and not delayed.is_enabled(Settings({}))
    assert list(delayed.condition(context())) == []


def test_in_python_and_by_itself():
    in_python = Context(Settings({}), "cpu", {}, None)
    assert list(FEATURE.condition(in_python)) == [] and FEATURE.arguments(in_python) == {}
    (left_off,) = automatic_reasons([FEATURE], context())[FEATURE.name]
    assert "memory" in left_off
