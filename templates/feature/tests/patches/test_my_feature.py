"""`--my-feature` in real Megatron: on against off, its reasons, its fallbacks."""

from __future__ import annotations

from types import SimpleNamespace

import mindspeed_lite
from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches import my_feature as patch
from tests.harness.processes import forked


@forked("megatron")
def test_it_gives_what_megatron_gives():
    from megatron.core.utils import divide

    off = divide(6, 3)
    with mindspeed_lite.enabled(my_feature=True, strict=True):
        assert divide(6, 3) == off
    assert divide(6, 3) == off


@forked("megatron")
def test_what_it_cannot_serve_is_left_to_megatron_with_a_reason():
    from megatron.core.utils import divide

    with mindspeed_lite.enabled(my_feature=True):
        assert divide(6, 1) == 6
        assert [each.feature for each in mindspeed_lite.report().fallbacks] == ["my_feature"]


def test_its_reasons():
    args = SimpleNamespace(transformer_impl="transformer_engine")
    context = Context(Settings({}), "cpu", {}, args)
    assert "transformer_engine" in patch.FEATURE.condition(context)[0]
