"""What both norms share; each one's own test has it in Megatron."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches._shared import local_norms


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_only_norms_of_one_kind_are_made(kind):
    made = []

    class Norm:
        verifier = None

    patch = local_norms.instead_of(kind, lambda *given: made.append(given) or Norm())
    new = patch.make(lambda *given: "megatron's", SimpleNamespace(verifier="one", on_end=lambda callback: None))
    fields = {"memory_efficient_layer_norm": False, "layernorm_zero_centered_gamma": True, "sequence_parallel": False}
    for normalization in ("LayerNorm", "RMSNorm"):
        norm = new(None, SimpleNamespace(normalization=normalization, **fields), 8, 1e-6)
        assert (norm == "megatron's") is (normalization != kind)
        assert norm == "megatron's" or norm.verifier == "one"
    assert made == [(8, 1e-6, True, False)]
    fields["memory_efficient_layer_norm"] = True
    assert new(None, SimpleNamespace(normalization=kind, **fields), 8) == "megatron's"


def test_reasons_name_the_flag():
    def reasons(**args):
        return local_norms.why_not(Context(Settings({}), "cpu", {}, args), "RMSNorm")

    assert reasons(normalization="RMSNorm") == []
    assert "--normalization LayerNorm" in reasons(normalization="LayerNorm")[0]
    assert "--memory-efficient-layer-norm" in reasons(memory_efficient_layer_norm=True)[0]
    assert "transformer_engine" in reasons(transformer_impl="transformer_engine")[0]
