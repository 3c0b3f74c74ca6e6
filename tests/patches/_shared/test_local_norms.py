"""Both fused norms in real Megatron: which norms become fused, their values, and that checkpoints interchange."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.patches.use_fused_layernorm import FusedLayerNorm
from mindspeed_lite.patches.use_fused_rmsnorm import FusedRMSNorm
from tests.harness.norms import HIDDEN, config_of, norm_of
from tests.harness.processes import forked

NORMS = {"LayerNorm": (FusedLayerNorm, torch.nn.LayerNorm), "RMSNorm": (FusedRMSNorm, torch.nn.RMSNorm)}
both = pytest.mark.parametrize("kind", NORMS)


def on(kind):
    return {f"use_fused_{kind.lower()}": True}


@both
@forked("megatron")
def test_only_norms_of_its_kind_are_fused_and_only_while_it_is_on(kind):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    fused, torchs = NORMS[kind]
    (other,) = NORMS.keys() - {kind}
    off = norm_of(normalization=kind)
    submodules = get_gpt_layer_local_spec(normalization=kind, qk_layernorm=True).submodules
    attention = submodules.self_attention.submodules
    with mindspeed_lite.enabled(**on(kind)):
        assert type(norm_of(normalization=kind)) is fused
        assert type(norm_of(normalization=other)) is NORMS[other][1]
        # The model's specification has imported the class by value.
        for make in (submodules.input_layernorm, submodules.pre_mlp_layernorm, attention.q_layernorm):
            assert type(make(config=config_of(normalization=kind), hidden_size=HIDDEN, eps=1e-5)) is fused
        with pytest.raises(AssertionError, match="memory_efficient_layer_norm"):
            norm_of(normalization=kind, memory_efficient_layer_norm=True)
    assert type(off) is type(norm_of(normalization=kind)) is torchs


@both
@forked("megatron")
def test_parameters_and_checkpoints_are_those_of_torchs_norm(kind):
    fused, torchs = NORMS[kind]
    theirs = norm_of(normalization=kind)
    mindspeed_lite.enable(**on(kind))
    ours = norm_of(normalization=kind)
    assert isinstance(ours, torchs) and list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.normalized_shape == theirs.normalized_shape and ours.eps == theirs.eps == 1e-5
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    for source, target in ((theirs, ours), (ours, theirs)):
        for parameter in source.parameters():
            torch.nn.init.uniform_(parameter)
        target.load_state_dict(source.state_dict(), strict=True)
        assert all(map(torch.equal, target.parameters(), source.parameters()))
    assert torch.equal(pickle.loads(pickle.dumps(ours)).weight, ours.weight)
    assert type(copy.deepcopy(ours)) is fused


@both
@forked("megatron")
def test_zero_centred_gamma_is_the_same_norm_with_one_added_to_its_weight(kind):
    fused, torchs = NORMS[kind]
    mindspeed_lite.enable(verify=1, **on(kind))
    centred = norm_of(normalization=kind, layernorm_zero_centered_gamma=True)
    plain = norm_of(normalization=kind)
    assert not any(each.any() for each in centred.parameters())
    x = torch.randn(5, HIDDEN)
    assert torch.equal(centred(x), plain(x))
    with torch.no_grad():
        plain.weight.copy_(torch.arange(HIDDEN) / 64)
        centred.weight.copy_(plain.weight - 1)  # multiples of 1/64: exact
    assert torch.equal(centred(x), plain(x))
    mindspeed_lite.disable()
    assert type(plain) is torchs and type(centred) is fused, "torch has no such norm"
    assert "verifier" not in vars(centred)
    with pytest.raises(AssertionError, match="zero_centered_gamma"):
        norm_of(normalization=kind, layernorm_zero_centered_gamma=True)
    mindspeed_lite.enable(**on(kind))
    assert type(plain) is fused and torch.equal(centred(x), plain(x)), "a living norm is fused again"


@both
@forked("megatron")
def test_sequence_parallelism_marks_its_parameters_and_nothing_else_does(kind):
    parallel = {"normalization": kind, "sequence_parallel": True, "tensor_model_parallel_size": 2}
    with pytest.raises(AssertionError, match="sequence parallel"):
        norm_of(**parallel)
    with mindspeed_lite.enabled(**on(kind)):
        assert all(each.sequence_parallel is True for each in norm_of(**parallel).parameters())
        assert not any(hasattr(each, "sequence_parallel") for each in norm_of(normalization=kind).parameters())
