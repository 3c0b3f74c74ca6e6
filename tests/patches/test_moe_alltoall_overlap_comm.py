"""`--moe-alltoall-overlap-comm`: what it says to Megatron, and when it says nothing."""

from __future__ import annotations

import pytest

from mindspeed_lite.engine import Context, Settings, automatic_reasons
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


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
        (
            {"moe_shared_expert_intermediate_size": 8, "recompute_modules": ["shared_experts"]},
            "--recompute-modules shared_experts",
        ),
        ({"overlap_moe_expert_parallel_comm": True}, "another micro-batch"),
        ({"cuda_graph_impl": "local"}, "records"),
    ],
)
def test_when_it_is_skipped(args, text):
    (reason,) = reasons(FEATURE, context(**args))
    assert text in reason


def test_auto_leaves_it_off():
    (left_off,) = automatic_reasons([FEATURE], context())[FEATURE.name]
    assert "measured" in left_off
