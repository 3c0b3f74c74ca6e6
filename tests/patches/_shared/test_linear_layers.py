"""Linear layers of Megatron: main gradients, and the seam of tensor-parallel communication."""

from __future__ import annotations

import torch

import mindspeed_lite
from mindspeed_lite.patches._shared import linear_layers
from tests.harness.process_groups import start
from tests.harness.processes import forked
from tests.patches.linear_layers import HIDDEN, ON, config_of, layer_of, messages, on_tensor_ranks, passes, same


def test_hooks_get_a_stand_in_where_they_count_gradients():
    weight = torch.nn.Parameter(torch.randn(4, 3))
    assert linear_layers.placeholder_grad(weight) is None, "no hook counts gradients"
    weight.grad_added_to_main_grad = False
    given = linear_layers.placeholder_grad(weight)
    assert given.shape == weight.shape and weight.grad_added_to_main_grad and not given.requires_grad
    weight.zero_out_wgrad = True
    assert not linear_layers.placeholder_grad(weight).any()


@forked("megatron")
def test_experts_and_single_ranks_are_left_alone():
    start()
    layer = layer_of("column", config_of(False))
    x = torch.randn(4, 1, HIDDEN).bfloat16()
    off = passes(layer, x)
    with mindspeed_lite.enabled(**ON):
        on, sent = messages(lambda: passes(layer, x))
        same(on, off)
        row = layer_of("row", config_of(False))
        _, more = messages(lambda: passes(row, torch.randn(4, 1, 24).bfloat16()))
    assert sent == more == []


@forked("megatron")
def test_an_experts_layer_is_left_to_its_dispatcher():
    def body(rank):
        config = config_of(
            False,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            num_moe_experts=2,
            moe_token_dispatcher_type="alltoall",
        )
        x = torch.randn(6, 1, HIDDEN).bfloat16()
        with mindspeed_lite.enabled(**ON):
            for kind, width in (("column", HIDDEN), ("row", 12)):
                layer = layer_of(kind, config, is_expert=True, bias=False, skip_bias_add=True)
                assert layer.explicit_expert_comm
                _, sent = messages(lambda layer=layer, width=width: layer(x[..., :width]))
                assert sent == []

    on_tensor_ranks(2, body)
