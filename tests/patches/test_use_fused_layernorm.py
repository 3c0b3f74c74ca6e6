"""`--use-fused-layernorm`: its own condition, and both norm features together; see `_shared/test_local_norms.py`."""

from __future__ import annotations

import importlib.util

import mindspeed_lite
from mindspeed_lite import platform
from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches import use_fused_layernorm as patch
from mindspeed_lite.patches import use_fused_rmsnorm
from tests.harness.norms import norm_of
from tests.harness.processes import forked
from tests.harness.swapped import is_swapped


@forked("megatron")
def test_both_norm_features_work_together():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = vars(WrappedTorchNorm)["__new__"]
    with mindspeed_lite.enabled(use_fused_layernorm=True, use_fused_rmsnorm=True):
        assert type(norm_of(normalization="LayerNorm")) is patch.FusedLayerNorm
        assert type(norm_of()) is use_fused_rmsnorm.FusedRMSNorm
        assert is_swapped(original)
    platform.deactivate()  # which has a patch there of its own
    assert vars(WrappedTorchNorm)["__new__"] is original and not is_swapped(original)


def test_an_installed_apex_is_a_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (apex,) = patch.FEATURE.condition(Context(Settings({}), "cpu", {}, {}))
    assert "Apex" in apex
