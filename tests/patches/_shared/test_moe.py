"""What the features for mixtures of experts share; each one's own test has it in Megatron."""

from __future__ import annotations

import pytest

from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches import moe_grouped_gemm, moe_permute_fusion, moe_router_fusion


@pytest.mark.parametrize("patch", [moe_grouped_gemm, moe_permute_fusion, moe_router_fusion])
def test_a_feature_wants_experts_of_the_local_implementation(patch):
    def reasons(args):
        return list(patch.FEATURE.condition(Context(Settings({}), "cpu", {}, args)))

    assert reasons({"num_experts": 4, "transformer_impl": "local"}) == []
    assert "--num-experts" in reasons({"num_experts": None})[0]
    assert "transformer_engine" in reasons({"num_experts": 4, "transformer_impl": "transformer_engine"})[0]
    assert reasons(None) == [], "in Python the model's configuration decides"


@pytest.mark.parametrize("patch", [moe_grouped_gemm, moe_permute_fusion, moe_router_fusion])
def test_it_sets_megatrons_argument_of_its_name(patch):
    def arguments(args):
        return patch.FEATURE.arguments(Context(Settings({}), "cpu", {}, args))

    assert arguments({"num_experts": 4}) == {patch.FEATURE.name: True} and arguments(None) == {}
