"""`--moe-hierarchical-alltoallv`: when it applies, and what it leaves alone; trainings are in tests/training."""

from __future__ import annotations

import os

import pytest

from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches.moe_hierarchical_alltoallv import FEATURE
from tests.harness.processes import forked, on_ranks
from tests.harness.swapped import reasons

MODEL = {"num_experts": 16, "expert_model_parallel_size": 8, "moe_token_dispatcher_type": "alltoall"}


def context(size=4, **args):
    return Context(Settings({"moe_node_size": size}), "cpu", {}, {**MODEL, **args})


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_the_size_of_a_node_is_the_flags_or_the_launchers(monkeypatch):
    assert reasons(FEATURE, context()) == []
    (reason,) = reasons(FEATURE, context(None))
    assert "neither --moe-node-size nor the launcher" in reason
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert reasons(FEATURE, context(None)) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert reasons(FEATURE, context(4)) == [], "the flag goes first"


def test_whole_experts_on_tensor_parallel_ranks_count_once():
    assert reasons(FEATURE, context(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)) == []


@forked("megatron")
def test_one_node_falls_back_once_and_strict_raises(tmp_path):
    def body(rank):
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state as ps
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        import mindspeed_lite
        from mindspeed_lite import platform
        from mindspeed_lite.engine import FallbackError
        from tests.harness.process_groups import joined

        platform.activate()
        joined(rank, 2, tmp_path)
        ps.initialize_model_parallel(expert_model_parallel_size=2)
        config = TransformerConfig(
            num_layers=1, hidden_size=4, num_attention_heads=1, num_moe_experts=2, moe_router_topk=2,
            moe_token_dispatcher_type="alltoall", expert_model_parallel_size=2, add_bias_linear=False,
        )  # fmt: skip
        dispatcher = MoEAlltoAllTokenDispatcher(1, [rank], config, get_default_pg_collection())
        routing_map = torch.ones(3, 2, dtype=torch.bool)

        def there_and_back():
            rows, probs = dispatcher.dispatch_preprocess(torch.ones(3, 1, 4), routing_map, torch.ones(3, 2))
            sent = len(rows)
            rows, _, _ = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, probs))
            y = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))
            assert torch.equal(y, torch.full((3, 1, 4), 2.0))
            return sent

        with mindspeed_lite.enabled(moe_hierarchical_alltoallv=True, moe_node_size=1):
            assert there_and_back() == 6
            assert not mindspeed_lite.report().fallbacks
            assert len(dist.distributed_c10d._world.pg_map) > 1
        groups = len(dist.distributed_c10d._world.pg_map)
        with mindspeed_lite.enabled(moe_hierarchical_alltoallv=True, moe_node_size=2):
            there_and_back()
            there_and_back()
            (found,) = mindspeed_lite.report().fallbacks
            assert "on one node of 2" in found.reason
        assert len(dist.distributed_c10d._world.pg_map) == groups
        with (
            mindspeed_lite.enabled(moe_hierarchical_alltoallv=True, moe_node_size=2, strict=True),
            pytest.raises(FallbackError, match="on one node of 2"),
        ):
            there_and_back()
        assert there_and_back() == 6
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        with mindspeed_lite.enabled(moe_hierarchical_alltoallv=True):
            del os.environ["LOCAL_WORLD_SIZE"]
            there_and_back()
            (found,) = mindspeed_lite.report().fallbacks
            assert "neither --moe-node-size nor the launcher" in found.reason

    on_ranks(2, body)
