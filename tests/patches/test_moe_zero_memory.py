"""`--moe-zero-memory` in real Megatron: the same bits, the memory that it saves, and when it says no."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mindspeed_lite
from tests.harness.gpt_block import BATCH, FFN, HIDDEN, LAYERS, SEQUENCE, model_of, same, step
from tests.harness.processes import forked

GROUPED = {"moe_grouped_gemm": True, "strict": True}
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": FFN, "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
TOKENS = SEQUENCE * BATCH
# Level and number of layers -> how many layers have level0 and level1.
CHOSEN = [("level0", None, (3, 0)), ("level0", 2, (2, 0)), ("level1", None, (0, 3)), ("level1", 1, (2, 1))]


@pytest.mark.parametrize(("level", "number", "counts"), CHOSEN)
@forked("megatron")
def test_rows_and_activations_are_not_kept(level, number, counts):
    with mindspeed_lite.enabled(**GROUPED):
        off = step(model_of(**EXPERTS))
    with mindspeed_lite.enabled(**GROUPED, moe_zero_memory=level, moe_zero_memory_num_layers=number):
        on = step(model_of(**EXPERTS))
        again = step(model_of(**EXPERTS))
    assert same(on, off) and same(again, off)
    rows = 2 * TOKENS * 2
    level0, level1 = (rows * HIDDEN + rows * FFN, rows * HIDDEN + 3 * rows * FFN)
    saved = counts[0] * level0 + counts[1] * level1
    assert off[0] - on[0] == saved


@pytest.mark.parametrize(
    "flags",
    [
        {"moe_zero_memory": "level0"},
        {"moe_zero_memory": "level1"},
        {"recompute_activation_function": True},
        {"recompute_norm": True},
    ],
    ids=["level0", "level1", "activation", "norm"],
)
@forked("megatron")
def test_under_a_checkpoint_of_the_users_nothing_is_released(flags):
    def checkpointed():
        model = model_of(**EXPERTS)
        for layer in model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        return model

    fused = {"moe_grouped_gemm": True, "use_fused_swiglu": True}
    with mindspeed_lite.enabled(**fused):
        off = step(checkpointed())
    with mindspeed_lite.enabled(**fused, **flags):
        assert same(step(checkpointed()), off)
        found = [each.reason for each in mindspeed_lite.report().fallbacks if each.feature in flags]
    assert found == ["torch.utils.checkpoint computes the layer again as a whole: nothing is released in it"]


@pytest.mark.parametrize(
    "fields",
    [
        {"bias_activation_fusion": False},
        {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu, "bias_activation_fusion": False},
        {"moe_expert_capacity_factor": 1.0},
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {"num_moe_experts": 1, "moe_router_topk": 1, "moe_router_pre_softmax": True},
        {"moe_permute_fusion": True},
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["moe_act", "layernorm"],
            "moe_grouped_gemm": True,
        },
    ],
    ids=["unfused", "plain", "dropped", "padded", "one expert", "permute fused", "recompute"],
)
@forked("megatron")
def test_every_kind_of_layer(fields):
    flags = {**GROUPED, "moe_permute_fusion": fields.get("moe_permute_fusion", False)}
    with mindspeed_lite.enabled(**flags):
        off = step(model_of(**{**EXPERTS, **fields}))
    for level in ("level0", "level1"):
        with mindspeed_lite.enabled(**flags, moe_zero_memory=level):
            on = step(model_of(**{**EXPERTS, **fields}))
        assert same(on, off) and on[0] < off[0]


SHARED = {"moe_shared_expert_intermediate_size": 48}


@pytest.mark.parametrize("overlapped", [False, True], ids=["whole", "beside messages"])
@forked("megatron")
def test_a_shared_expert_releases_its_activation(overlapped):
    fields = {**EXPERTS, **SHARED, "moe_shared_expert_overlap": overlapped}
    with mindspeed_lite.enabled(**GROUPED):
        off = step(model_of(**fields))
    size = 2 * TOKENS * SHARED["moe_shared_expert_intermediate_size"]
    for level, numbers in (("level0", 1), ("level1", 3)):
        with mindspeed_lite.enabled(**GROUPED, moe_zero_memory=level):
            model = model_of(**fields)
            on, again = step(model), step(model)
        assert same(on, off) and same(again, off)
        rows = 2 * TOKENS * 2
        saved = LAYERS * (rows * (HIDDEN + numbers * FFN) + numbers * size)
        assert off[0] - on[0] == saved


@pytest.mark.parametrize(
    "fields",
    [
        {"bias_activation_fusion": False},
        {"moe_shared_expert_gate": True},
        {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]},
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    ],
    ids=["unfused", "gate", "recomputed whole", "norm recomputed"],
)
@forked("megatron")
def test_every_kind_of_shared_expert(fields):
    fields = {**EXPERTS, **SHARED, **fields}
    with mindspeed_lite.enabled(**GROUPED):
        off = step(model_of(**fields))
    for level in ("level0", "level1"):
        with mindspeed_lite.enabled(**GROUPED, moe_zero_memory=level):
            assert same(step(model_of(**fields)), off)
        # Its activation is released once, by the feature that was asked for it.
        with mindspeed_lite.enabled(**GROUPED, moe_zero_memory=level, recompute_activation_function=True):
            assert same(step(model_of(**fields)), off)


@forked("megatron")
def test_a_model_that_was_built_before_keeps_what_it_keeps():
    flags = {**GROUPED, "strict": False}
    with mindspeed_lite.enabled(**flags):
        model = model_of(**EXPERTS)
        off = step(model)
    with mindspeed_lite.enabled(**flags, moe_zero_memory="level0"):
        on = step(model)
        (said,) = mindspeed_lite.report().fallbacks
    assert on[0] == off[0] and same(on, off) and "built before" in str(said)


@forked("megatron")
def test_without_gradients_nothing_is_released():
    with mindspeed_lite.enabled(**GROUPED, moe_zero_memory="level1"), torch.no_grad():
        model = model_of(**EXPERTS)
        x = torch.randn(SEQUENCE, BATCH, HIDDEN).bfloat16()
        assert torch.equal(model(x, attention_mask=None), model(x, attention_mask=None))


@forked("megatron")
def test_an_evaluation_takes_nothing_that_a_failed_pass_left():
    from mindspeed_lite.parallel.expert.recomputed_rows import RecomputedRows

    def fail(*_):
        raise RuntimeError("no message leaves")

    with mindspeed_lite.enabled(**GROUPED, moe_zero_memory="level1"):
        model = model_of(**EXPERTS)
        x = torch.randn(SEQUENCE, BATCH, HIDDEN).bfloat16()
        dispatchers = [each.token_dispatcher for each in model.modules() if hasattr(each, "token_dispatcher")]
        dispatchers[0].token_dispatch = fail
        with pytest.raises(RuntimeError, match="no message leaves"):
            model(x, attention_mask=None)
        del dispatchers[0].token_dispatch
        RecomputedRows.release = fail
        with torch.no_grad():
            model(x, attention_mask=None)
