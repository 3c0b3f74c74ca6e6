"""`--recompute-activation-function` in real Megatron: the same bits, and exactly the memory that arithmetic gives."""

from __future__ import annotations

import pytest
import torch

import mindspeed_lite
from mindspeed_lite import platform
from tests.harness.gpt_block import BATCH, FFN, HIDDEN, LAYERS, SEQUENCE, model_of, same, step
from tests.harness.processes import forked

ON = {"recompute_activation_function": True, "strict": True}
ONE = 2 * SEQUENCE * BATCH * FFN


@pytest.mark.parametrize("number", [None, 1, 2, 7])
@forked("megatron")
def test_an_activation_for_each_layer_is_not_kept(number):
    off = step(model_of())
    flags = ON if number is None else {"recompute_activation_function_num_layers": number, "strict": True}
    with mindspeed_lite.enabled(**flags):
        on = step(model_of())
    assert off[0] - on[0] == min(number or LAYERS, LAYERS) * ONE
    assert same(on, off)


GELU = {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu}


@pytest.mark.parametrize(
    "fields, released",
    [
        # The unfused product keeps both its factors too, the second one after an offset.
        ({"bias_activation_fusion": False}, 3 * ONE),
        ({**GELU, "bias_activation_fusion": False}, ONE),
        ({**GELU, "add_bias_linear": True}, ONE),
    ],
    ids=["unfused", "plain", "bias"],
)
@forked("megatron")
def test_every_kind_of_activation(fields, released):
    off = step(model_of(**fields))
    with mindspeed_lite.enabled(**ON):
        on = step(model_of(**fields))
    assert off[0] - on[0] == LAYERS * released and same(on, off)


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": FFN, "moe_router_dtype": "fp32"}


@pytest.mark.parametrize("grouped", [False, True])
@forked("megatron")
def test_experts_give_up_theirs(grouped):
    more = {"moe_grouped_gemm": True} if grouped else {}
    with mindspeed_lite.enabled(**more):
        off = step(model_of(**EXPERTS))
    with mindspeed_lite.enabled(**ON, **more):
        on = step(model_of(**EXPERTS))
    assert off[0] - on[0] == 2 * LAYERS * ONE and same(on, off), "two experts for each token"


@forked("megatron")
def test_without_gradients_nothing_is_released():
    with mindspeed_lite.enabled(**ON):
        model = model_of()
        with torch.no_grad():
            x = torch.randn(SEQUENCE, BATCH, HIDDEN).bfloat16()
            out = model(x, attention_mask=None)
            assert torch.equal(out, model(x, attention_mask=None))
    platform.activate()
    assert torch.equal(out, model(x, attention_mask=None).detach()), "a model that was built with it works without"


@forked("megatron")
def test_a_bias_of_experts_is_left_to_megatron_and_said():
    fields = {**EXPERTS, "add_bias_linear": True, "bias_activation_fusion": False}
    with mindspeed_lite.enabled(recompute_activation_function=True):
        model = model_of(**fields)
        expert = model.layers[0].mlp.experts.local_experts[0]
        # As with expert parallelism: on one rank Megatron's own experts fail with a bias, added in place to a view.
        expert.linear_fc2.explicit_expert_comm = True
        out, _ = expert(torch.randn(5, HIDDEN).bfloat16().requires_grad_(), per_token_scale=torch.rand(5))
        (said,) = mindspeed_lite.report().fallbacks
    assert "bias" in str(said) and out.shape == (5, HIDDEN)
