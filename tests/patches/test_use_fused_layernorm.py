"""`--use-fused-layernorm` in real Megatron: what becomes ours, what stays, and that checkpoints do not care."""

from __future__ import annotations

import copy
import importlib.util
import pickle

import pytest
import torch

import mindspeed_lite
from mindspeed_lite import platform
from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches import use_fused_layernorm as patch
from mindspeed_lite.patches import use_fused_rmsnorm
from tests.harness.compare import error, forward_backward
from tests.harness.norms import HIDDEN, config_of
from tests.harness.norms import norm_of as rms_norm_of
from tests.harness.processes import forked
from tests.harness.swapped import is_swapped

FEATURE = patch.FEATURE


def norm_of(**fields):
    """The norm that Megatron's local implementation makes for a configuration with these fields."""
    return rms_norm_of(**{"normalization": "LayerNorm", **fields})


@forked("megatron")
def test_only_layer_norms_become_ours_and_only_while_it_is_on():
    off = norm_of()
    with mindspeed_lite.enabled(use_fused_layernorm=True):
        assert type(norm_of()) is patch.FusedLayerNorm
        assert type(norm_of(normalization="RMSNorm")) is torch.nn.RMSNorm
    assert type(off) is type(norm_of()) is torch.nn.LayerNorm


@forked("megatron")
def test_both_norm_features_stand_side_by_side_whichever_is_asked_for_first():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = vars(WrappedTorchNorm)["__new__"]
    with mindspeed_lite.enabled(use_fused_layernorm=True, use_fused_rmsnorm=True):
        assert type(norm_of()) is patch.FusedLayerNorm
        assert type(norm_of(normalization="RMSNorm")) is use_fused_rmsnorm.FusedRMSNorm
        assert is_swapped(original)
    platform.deactivate()  # which has a patch there of its own
    assert vars(WrappedTorchNorm)["__new__"] is original and not is_swapped(original)


@forked("megatron")
def test_the_models_own_specification_gets_them():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    submodules = get_gpt_layer_local_spec(normalization="LayerNorm", qk_layernorm=True).submodules
    attention = submodules.self_attention.submodules
    makers = (submodules.input_layernorm, submodules.pre_mlp_layernorm, attention.q_layernorm, attention.k_layernorm)
    with mindspeed_lite.enabled(use_fused_layernorm=True):
        for make in makers:
            norm = make(config=config_of(normalization="LayerNorm"), hidden_size=HIDDEN, eps=1e-5)
            assert type(norm) is patch.FusedLayerNorm


@forked("megatron")
def test_parameters_and_checkpoints_are_those_of_torchs_norm():
    off = norm_of()
    mindspeed_lite.enable(use_fused_layernorm=True)
    on = norm_of()
    assert list(on.state_dict()) == list(off.state_dict()) == ["weight", "bias"]
    assert on.normalized_shape == off.normalized_shape and on.eps == off.eps == 1e-5
    assert torch.equal(on.weight, torch.ones(HIDDEN)) and torch.equal(on.bias, torch.zeros(HIDDEN))
    for source, target in ((off, on), (on, off)):
        torch.nn.init.uniform_(source.weight)
        torch.nn.init.uniform_(source.bias)
        target.load_state_dict(source.state_dict(), strict=True)
        assert torch.equal(target.weight, source.weight) and torch.equal(target.bias, source.bias)
    assert torch.equal(pickle.loads(pickle.dumps(on)).weight, on.weight)
    assert type(copy.deepcopy(on)) is patch.FusedLayerNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@forked("megatron")
def test_the_result_is_at_least_as_near_to_the_truth(dtype):
    generator = torch.Generator().manual_seed(3)
    # [s, b, h]; rows of very different size, so that eps counts in some
    x = torch.randn(7, 2, HIDDEN, generator=generator) * torch.logspace(-3, 2, 7).reshape(7, 1, 1)
    weight, bias = (torch.rand(HIDDEN, generator=generator) for _ in range(2))
    dout = torch.randn(7, 2, HIDDEN, generator=generator)
    off = norm_of()
    mindspeed_lite.enable(use_fused_layernorm=True)
    on = norm_of()

    def through(norm):
        return lambda x, weight, bias: torch.func.functional_call(norm, {"weight": weight, "bias": bias}, (x,))

    inputs = [x.to(dtype), weight.to(dtype), bias.to(dtype)]
    exact = forward_backward(through(off), inputs, dout.to(dtype), torch.float64)
    replaced = forward_backward(through(off), inputs, dout.to(dtype))
    for ours, theirs, truth in zip(forward_backward(through(on), inputs, dout.to(dtype)), replaced, exact, strict=True):
        # One rounding of the result is free; both paths round it.
        assert error(ours, truth) <= error(theirs, truth) + torch.finfo(dtype).eps / 2


@forked("megatron")
def test_zero_centred_gamma_is_the_same_norm_with_one_added_to_its_weight():
    mindspeed_lite.enable(use_fused_layernorm=True)
    centred, plain = norm_of(layernorm_zero_centered_gamma=True), norm_of()
    assert not centred.weight.any() and not centred.bias.any()
    x = torch.randn(5, HIDDEN)
    assert torch.equal(centred(x), plain(x))
    with torch.no_grad():
        plain.weight.copy_(torch.arange(HIDDEN) / 64)
        centred.weight.copy_(plain.weight - 1)  # multiples of 1/64: exact
    assert torch.equal(centred(x), plain(x))
    mindspeed_lite.disable()
    assert type(plain) is torch.nn.LayerNorm and type(centred) is patch.FusedLayerNorm, "torch has no such norm"
    with pytest.raises(AssertionError, match="zero_centered_gamma"):
        norm_of(layernorm_zero_centered_gamma=True)


@forked("megatron")
def test_sequence_parallelism_marks_both_parameters_and_nothing_else_does():
    with pytest.raises(AssertionError, match="sequence parallel"):
        norm_of(sequence_parallel=True, tensor_model_parallel_size=2)
    with mindspeed_lite.enabled(use_fused_layernorm=True):
        parallel, plain = norm_of(sequence_parallel=True, tensor_model_parallel_size=2), norm_of()
        assert norm_of(persist_layer_norm=True) is not None
        with pytest.raises(AssertionError, match="memory_efficient_layer_norm"):
            norm_of(memory_efficient_layer_norm=True)
    assert parallel.weight.sequence_parallel is parallel.bias.sequence_parallel is True
    assert not hasattr(plain.weight, "sequence_parallel") and not hasattr(plain.bias, "sequence_parallel")


def reasons(**host_args):
    return list(FEATURE.condition(Context(Settings({}), "cpu", {}, host_args)))


def test_conditions_name_what_is_in_the_way(monkeypatch):
    assert reasons() == [] == reasons(transformer_impl="local", normalization="LayerNorm")
    (engine,) = reasons(transformer_impl="transformer_engine")
    assert "--transformer-impl transformer_engine" in engine
    (kind,) = reasons(normalization="RMSNorm")
    assert "--normalization RMSNorm" in kind
    (efficient,) = reasons(memory_efficient_layer_norm=True)
    assert "--memory-efficient-layer-norm" in efficient
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (apex,) = reasons()
    assert "Apex" in apex


@forked("megatron")
def test_the_first_calls_are_compared_under_verify():
    with mindspeed_lite.enabled(use_fused_layernorm=True, verify=1, strict=True):
        for norm in (norm_of(), norm_of(layernorm_zero_centered_gamma=True)):
            norm(torch.randn(6, 2, HIDDEN))
        checked = mindspeed_lite.report().verifications
    assert [(each.operator, each.verdict) for each in checked] == [("layer_norm", "ok")] * 2


@forked("megatron")
def test_the_report_names_target_and_backend():
    report = mindspeed_lite.enable(use_fused_layernorm=True)
    entry = next(each for each in report.entries if each.feature == "use_fused_layernorm")
    assert entry.status == "applied" and entry.backends == ["layer_norm:cpu"] and entry.numerics == "ulp"
    (placed,) = entry.patches
    assert placed.target == "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__"
    assert (placed.how, placed.verified) == ("override", "verified")
