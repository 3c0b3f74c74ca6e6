"""What the features for mixtures of experts share; each one's own test has it in Megatron."""

from __future__ import annotations

import pytest

from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches import moe_grouped_gemm, moe_permute_fusion, moe_router_fusion
from tests.harness.process_groups import start
from tests.harness.processes import forked


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


@forked("megatron")
def test_a_layer_that_is_read_waits_for_its_parameters_whatever_else_looks_on():
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from mindspeed_lite.patches._shared.moe import before_call, has_hooks

    start()
    told = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = DistributedDataParallel(config, told, torch.nn.Sequential(torch.nn.Linear(8, 8)))
    layer, seen = model.module[0], []
    for group in model.bucket_groups:
        group.finish_param_sync = lambda **_: seen.append("gathered")
    before_call(layer)
    assert set(seen) == {"gathered"} and not has_hooks(layer)
    layer.register_forward_pre_hook(lambda *_: seen.append("entered"))
    seen.clear()
    before_call(layer)
    assert set(seen) == {"gathered"} and has_hooks(layer)
