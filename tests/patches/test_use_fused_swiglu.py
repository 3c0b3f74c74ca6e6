"""`--use-fused-swiglu` in Megatron's own MLP and experts: the same activation as without it, or the original."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mindspeed_lite
from mindspeed_lite.ops.activation import OPERATOR
from tests.harness.processes import forked
from tests.patches.mlp import WIDTH, mlp_of

ROWS, BATCH = 5, 2


@forked("megatron")
def test_local_experts_are_reached():
    from megatron.core.transformer.moe.experts import SequentialMLP

    experts = SequentialMLP.__new__(SequentialMLP)
    torch.nn.Module.__init__(experts)
    one, other = (mlp_of({"activation": "silu", "gated_linear_unit": True}) for _ in range(2))
    experts.config, experts.num_local_experts = one.config, 2
    experts.local_experts = torch.nn.ModuleList([one, other])
    tokens, counts, probs = torch.randn(7, WIDTH), torch.tensor([3, 4]), torch.rand(7)
    off = experts(tokens, counts, probs)[0]
    before = len(OPERATOR._chosen)
    with mindspeed_lite.enabled(use_fused_swiglu=True, strict=True):
        on = experts(tokens, counts, probs)[0]
    assert len(OPERATOR._chosen) == before + 1, "the operator was not asked"
    torch.testing.assert_close(on, off, rtol=1e-6, atol=1e-7)


@forked("megatron")
def test_only_the_input_is_kept_for_the_backward_pass():
    x = torch.randn(ROWS, BATCH, WIDTH, requires_grad=True)
    with mindspeed_lite.enabled(use_fused_swiglu=True):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            mlp_of({"activation": "silu", "gated_linear_unit": True})(x)
    assert {t.data_ptr() for t in kept} == {x.data_ptr()}


@forked("megatron")
def test_bias_and_weights_together_which_megatron_refuses_are_computed():
    from megatron.core.fusions import fused_bias_swiglu

    x, bias, weights = torch.randn(3, 8), torch.randn(8), torch.rand(3, 1)
    with pytest.raises(NotImplementedError):
        fused_bias_swiglu.weighted_bias_swiglu_impl(x, bias, weights)
    with mindspeed_lite.enabled(use_fused_swiglu=True, verify=1):
        got = fused_bias_swiglu.weighted_bias_swiglu_impl(x, bias, weights)
    gate, up = (x + bias).chunk(2, -1)
    torch.testing.assert_close(got, F.silu(gate) * up * weights)


@forked("megatron")
def test_a_configuration_calls_megatrons_fused_function_where_that_computes_the_same():
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer import TransformerConfig

    def fused(activation_func=F.silu, gated_linear_unit=True, **fields):
        given = {"activation_func": activation_func, "gated_linear_unit": gated_linear_unit, **fields}
        return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **given).bias_activation_fusion

    others = ({"gated_linear_unit": False}, {"activation_func": F.gelu}, {"activation_func": quick_gelu},
              {"activation_func_clamp_value": 7.0}, {"glu_linear_offset": 1.0}, {"use_te_activation_func": True},
              {"activation_func_fp8_input_store": True})  # fmt: skip
    assert not fused()
    with mindspeed_lite.enabled(use_fused_swiglu=True):
        assert fused()
        assert not any(fused(**fields) for fields in others)
    assert not fused()
