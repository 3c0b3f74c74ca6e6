"""`--moe-allgather-overlap-comm`: when it says nothing, and what becomes of a shared expert it cannot take apart."""

from __future__ import annotations

import pytest
import torch

import mindspeed_lite
from tests.harness.gpt_block import FFN, model_of, same, step
from tests.harness.processes import forked

SHARED = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": FFN, "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "allgather", "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "flags", "text"),
    [
        ({"moe_shared_expert_gate": True}, {}, "gate"),
        ({}, {"recompute_activation_function": True}, "activation is recomputed"),
        ({"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]}, {}, "as a whole"),
    ],
)
@forked("megatron")
def test_a_shared_expert_that_runs_where_megatron_has_it(fields, flags, text):
    with mindspeed_lite.enabled(**flags):
        off = step(model_of(**SHARED, **fields))
    with mindspeed_lite.enabled(moe_allgather_overlap_comm=True, **flags):
        on = step(model_of(**SHARED, **fields))
        (said,) = mindspeed_lite.report().fallbacks
    assert same(on, off) and text in str(said)


@forked("megatron")
def test_a_shared_expert_in_two_parts_is_the_whole_one():
    """On one rank, without messages: the same sums in the same order."""
    off = step(model_of(**SHARED))
    with mindspeed_lite.enabled(moe_allgather_overlap_comm=True, strict=True):
        model = model_of(**SHARED)
        on = step(model)
        with torch.no_grad():
            step_free = model(torch.ones(24, 2, 32).bfloat16(), attention_mask=None)
    assert same(on, off) and torch.equal(step_free, model(torch.ones(24, 2, 32).bfloat16(), attention_mask=None))
