"""`--moe-alltoall-mc2`: when it applies; trainings with a twin of the operators are in tests/training."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mindspeed_lite.engine import OptionError
from mindspeed_lite.patches import moe_alltoall_mc2


def test_an_older_torch_npu_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_alltoallv_gmm=None))
    monkeypatch.setattr(moe_alltoall_mc2.importlib.util, "find_spec", lambda name: True)
    (reason,) = moe_alltoall_mc2._why_not_here("npu")
    assert "this torch_npu has no npu_gmm_alltoallv" in reason


@pytest.mark.parametrize(("given", "said"), [((), "its reason was logged"), (("a frozen weight",), "a frozen weight")])
def test_experts_that_exchange_nothing_end_in_one_line(given, said):
    state = moe_alltoall_mc2._State()
    session = SimpleNamespace(find=lambda name: state)
    moe_alltoall_mc2.check_exchanged(session, given)
    state.left = 2
    text = rf"^moe_alltoall_mc2: .* \({said}\), so that no token is exchanged: leave --moe-alltoall-mc2 out\.$"
    with pytest.raises(OptionError, match=text):
        moe_alltoall_mc2.check_exchanged(session, given)
