"""`--moe-alltoall-overlap-comm`: what it says to Megatron, and when it says nothing."""

from __future__ import annotations

from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches.moe_alltoall_overlap_comm import FEATURE
from tests.harness.swapped import reasons

MODEL = {"num_experts": 8, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}


def context(**args):
    return Context(Settings({}), "cpu", {}, {**MODEL, **args})


def test_a_shared_expert_is_taken_apart_by_megatrons_own_flag():
    assert reasons(FEATURE, context()) == [] and FEATURE.arguments(context()) == {}
    shared = context(moe_shared_expert_intermediate_size=64)
    assert FEATURE.arguments(shared) == {"moe_shared_expert_overlap": True} and reasons(FEATURE, shared) == []
    assert FEATURE.arguments(Context(Settings({}), "cpu", {}, None)) == {}
