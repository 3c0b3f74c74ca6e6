"""`--moe-tp-extend-ep`: what it says to Megatron, and when it says nothing."""

from __future__ import annotations

from mindspeed_lite.engine import Context, Settings, automatic_reasons
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


def test_when_it_is_skipped():
    assert "4 ranks" in reasons(num_experts=6)[0]
    assert "--tensor-model-parallel-size 1" in reasons(tensor_model_parallel_size=1)[0]
    assert "--num-experts" in reasons(num_experts=None)[0]
    given = reasons({}, {"expert_tensor_parallel_size"}, expert_tensor_parallel_size=2)
    assert "--expert-tensor-parallel-size 2" in given[0]
    (left_off,) = automatic_reasons([FEATURE], context())[FEATURE.name]
    assert "which rank holds which expert" in left_off
    (reason,) = FEATURE.condition(Context(Settings({}), "cpu", {}, None))
    assert "in Python" in reason
