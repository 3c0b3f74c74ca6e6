"""`--moe-tp-extend-ep`: what it says to Megatron, and when it says nothing."""

from __future__ import annotations

from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches import moe_tp_extend_ep as patch

FEATURE = patch.FEATURE
MODEL = {"num_experts": 8, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}


def context(settings=None, explicit=frozenset(), **args):
    return Context(Settings(settings or {}), "cpu", {}, {**MODEL, **args}, explicit)


def reasons(*given, **args):
    return list(FEATURE.condition(context(*given, **args)))


def test_it_says_megatrons_own_two_flags():
    assert reasons() == []
    assert FEATURE.arguments(context()) == {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 4}
