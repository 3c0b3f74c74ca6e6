"""`--use-fused-rmsnorm` in real Megatron: what becomes a fused norm, what stays, and that checkpoints do not care."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import mindspeed_lite
from mindspeed_lite import platform
from mindspeed_lite.engine import Context, PlanError, Settings
from mindspeed_lite.patches import use_fused_rmsnorm as patch
from tests.harness.compare import assert_not_worse, forward_backward
from tests.harness.norms import HIDDEN, config_of, norm_of
from tests.harness.processes import forked
from tests.harness.swapped import is_swapped

FEATURE = patch.FEATURE


@forked("megatron")
def test_only_rms_norms_become_fused_and_only_while_it_is_on():
    off = norm_of()
    with mindspeed_lite.enabled(use_fused_rmsnorm=True):
        assert type(norm_of()) is patch.FusedRMSNorm
        assert type(norm_of(normalization="LayerNorm")) is torch.nn.LayerNorm
    assert type(off) is type(norm_of()) is torch.nn.RMSNorm


@forked("megatron")
def test_the_models_own_specification_gets_fused_norms():
    """Whoever imported WrappedTorchNorm by value has it too: it is the class that changes, not its name."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    attention = spec.submodules.self_attention.submodules
    makers = {
        "input": spec.submodules.input_layernorm,
        "mlp": spec.submodules.pre_mlp_layernorm,
        "query": attention.q_layernorm,
        "key": attention.k_layernorm,
    }
    with mindspeed_lite.enabled(use_fused_rmsnorm=True):
        for name, make in makers.items():
            norm = make(config=config_of(), hidden_size=HIDDEN, eps=1e-5)
            assert type(norm) is patch.FusedRMSNorm, name


@forked("megatron")
def test_parameters_and_checkpoints_are_those_of_torchs_norm():
    off = norm_of()
    mindspeed_lite.enable(use_fused_rmsnorm=True)
    on = norm_of()
    assert isinstance(on, torch.nn.RMSNorm)
    assert list(on.state_dict()) == list(off.state_dict()) == ["weight"]
    assert on.normalized_shape == off.normalized_shape and on.eps == off.eps == 1e-5
    assert torch.equal(on.weight, torch.ones(HIDDEN)) and on.weight.dtype == off.weight.dtype
    for source, target in ((off, on), (on, off)):
        torch.nn.init.uniform_(source.weight)
        assert not target.load_state_dict(source.state_dict(), strict=True).missing_keys
        assert torch.equal(target.weight, source.weight)
    assert torch.equal(pickle.loads(pickle.dumps(on)).weight, on.weight)
    assert type(copy.deepcopy(on)) is patch.FusedRMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@forked("megatron")
def test_the_result_is_at_least_as_near_to_the_truth(dtype):
    generator = torch.Generator().manual_seed(3)
    # [s, b, h]; rows of very different size, so that eps counts in some
    x = torch.randn(7, 2, HIDDEN, generator=generator) * torch.logspace(-3, 2, 7).reshape(7, 1, 1)
    weight, dout = torch.rand(HIDDEN, generator=generator), torch.randn(7, 2, HIDDEN, generator=generator)
    off = norm_of()
    mindspeed_lite.enable(use_fused_rmsnorm=True)
    on = norm_of()

    def through(norm):
        return lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, (x,))

    inputs = [x.to(dtype), weight.to(dtype)]
    exact = forward_backward(through(off), inputs, dout.to(dtype), torch.float64)
    replaced = forward_backward(through(off), inputs, dout.to(dtype))
    got = forward_backward(through(on), inputs, dout.to(dtype))
    # One rounding of the result is free; both paths round it.
    assert_not_worse(got, replaced, exact, torch.finfo(dtype).eps / 2, ("output", "dx", "dweight"))


@forked("megatron")
def test_zero_centred_gamma_is_the_same_norm_with_one_added_to_its_weight():
    mindspeed_lite.enable(use_fused_rmsnorm=True)
    centred, plain = norm_of(layernorm_zero_centered_gamma=True), norm_of()
    assert torch.equal(centred.weight, torch.zeros(HIDDEN))
    x = torch.randn(5, HIDDEN)
    assert torch.equal(centred(x), plain(x))
    with torch.no_grad():
        plain.weight.copy_(torch.arange(HIDDEN) / 64)
        centred.weight.copy_(plain.weight - 1)  # multiples of 1/64: exact
    assert torch.equal(centred(x), plain(x))
    mindspeed_lite.disable()
    assert type(plain) is torch.nn.RMSNorm and type(centred) is patch.FusedRMSNorm, "torch has no such norm"
    with pytest.raises(AssertionError, match="zero_centered_gamma"):
        norm_of(layernorm_zero_centered_gamma=True)


@forked("megatron")
def test_sequence_parallelism_marks_the_weight_and_nothing_else_does():
    with mindspeed_lite.enabled(use_fused_rmsnorm=True):
        parallel = norm_of(sequence_parallel=True, tensor_model_parallel_size=2)
        plain = norm_of()
    assert parallel.weight.sequence_parallel is True
    assert not hasattr(plain.weight, "sequence_parallel")


@forked("megatron")
def test_the_device_layer_alone_marks_torchs_norms_as_well():
    from mindspeed_lite import platform

    with pytest.raises(AssertionError, match="sequence parallel"):
        norm_of(sequence_parallel=True, tensor_model_parallel_size=2)
    platform.activate()
    for normalization, kind in (("RMSNorm", torch.nn.RMSNorm), ("LayerNorm", torch.nn.LayerNorm)):
        config = config_of(normalization=normalization, sequence_parallel=True, tensor_model_parallel_size=2)
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        norm = WrappedTorchNorm(config, HIDDEN, 1e-5)
        assert type(norm) is kind and all(each.sequence_parallel for each in norm.parameters())
        assert config.sequence_parallel is True, "the configuration is the user's"
        assert not hasattr(norm_of(normalization=normalization).weight, "sequence_parallel")


@forked("megatron")
def test_what_the_norm_does_not_do_is_still_refused():
    with (
        mindspeed_lite.enabled(use_fused_rmsnorm=True),
        pytest.raises(AssertionError, match="memory_efficient_layer_norm"),
    ):
        norm_of(memory_efficient_layer_norm=True)


def reasons(**host_args):
    return list(FEATURE.condition(Context(Settings({}), "cpu", {}, host_args)))


def test_conditions_name_the_flag_that_is_in_the_way():
    assert reasons() == [] == reasons(transformer_impl="local", normalization="RMSNorm")
    (engine,) = reasons(transformer_impl="transformer_engine")
    assert "--transformer-impl transformer_engine" in engine
    (kind,) = reasons(normalization="LayerNorm")
    assert "--normalization LayerNorm" in kind
    assert len(reasons(transformer_impl="transformer_engine", normalization="LayerNorm")) == 2


@forked("megatron")
def test_a_feature_that_does_not_apply_is_skipped_with_its_reasons_or_refused_if_strict():
    host_args = {"normalization": "LayerNorm", "transformer_impl": "transformer_engine"}
    report = mindspeed_lite.enable(host_args=host_args, use_fused_rmsnorm=True)
    entry = next(each for each in report.entries if each.feature == "use_fused_rmsnorm")
    assert (entry.status, len(entry.reasons), entry.patches) == ("skipped", 2, [])
    assert type(norm_of()) is torch.nn.RMSNorm
    with pytest.raises(PlanError, match=r"--use-fused-rmsnorm.*LayerNorm"):
        mindspeed_lite.enable(host_args=host_args, use_fused_rmsnorm=True, strict=True)


@forked("megatron")
def test_the_report_names_target_and_backend_and_disable_restores_the_target():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = vars(WrappedTorchNorm)["__new__"]
    report = mindspeed_lite.enable(use_fused_rmsnorm=True)
    entry = next(each for each in report.entries if each.feature == "use_fused_rmsnorm")
    assert entry.status == "applied" and entry.backends == ["rms_norm:cpu"] and entry.numerics == "ulp"
    (placed,) = entry.patches
    assert placed.target == "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__"
    assert (placed.how, placed.verified) == ("override", "verified")
    assert is_swapped(original)
    assert mindspeed_lite.disable() == []
    platform.deactivate()  # which has a patch there of its own
    assert not is_swapped(original)
    assert vars(WrappedTorchNorm)["__new__"] is original
