"""`--moe-alltoall-mc2`: when it applies; trainings with a twin of the operators are in tests/training."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest

from mindspeed_lite.engine import Context, OptionError, Settings
from mindspeed_lite.patches import moe_alltoall_mc2
from mindspeed_lite.patches.moe_alltoall_mc2 import FEATURE
from tests.harness.swapped import reasons

MODEL = {"num_experts": 16, "expert_model_parallel_size": 8, "moe_token_dispatcher_type": "alltoall"}


def context(device="npu", **args):
    return Context(Settings({}), device, {}, {**MODEL, **args})


@pytest.fixture
def wheel(monkeypatch):
    """A torch_npu with both operators."""
    made = types.SimpleNamespace(npu_alltoallv_gmm=None, npu_gmm_alltoallv=None)
    monkeypatch.setitem(sys.modules, "torch_npu", made)
    monkeypatch.setattr(moe_alltoall_mc2.importlib.util, "find_spec", lambda name: True)
    return made


def test_it_needs_an_npu_and_the_operators(wheel):
    assert reasons(FEATURE, context()) == []
    (reason,) = reasons(FEATURE, context("cpu"))
    assert "the device is cpu" in reason
    del wheel.npu_gmm_alltoallv
    (reason,) = reasons(FEATURE, context())
    assert "this torch_npu has no npu_gmm_alltoallv" in reason


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
        ({"tensor_model_parallel_size": 2}, "--expert-tensor-parallel-size 1"),
        ({"add_bias_linear": True}, "--disable-bias-linear"),
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor"),
        ({"moe_apply_probs_on_input": True}, "--moe-apply-probs-on-input"),
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ({"cuda_graph_impl": "local"}, "records"),
    ],
)
def test_when_it_does_not_apply(wheel, args, text):
    (reason,) = reasons(FEATURE, context(**args))
    assert text in reason


@pytest.mark.parametrize(("given", "said"), [((), "its reason was logged"), (("a frozen weight",), "a frozen weight")])
def test_experts_that_exchange_nothing_end_in_one_line(given, said):
    state = moe_alltoall_mc2._State()
    session = SimpleNamespace(find=lambda name: state)
    moe_alltoall_mc2.check_exchanged(session, given)
    state.left = 2
    text = rf"^moe_alltoall_mc2: .* \({said}\), so that no token is exchanged: leave --moe-alltoall-mc2 out\.$"
    with pytest.raises(OptionError, match=text):
        moe_alltoall_mc2.check_exchanged(session, given)
