"""Which experts change places; `tests/training/test_enable_expert_placement.py` trains them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_lite.engine import Context, Report, Session, Settings
from mindspeed_lite.patches import enable_expert_placement as patch
from tests.harness.processes import forked


@forked("megatron")
def test_other_experts_are_a_reason_and_experts_away_refuse_state_dicts():
    settings = Settings({patch.INTERVAL: 50, patch.BREAK_EVEN: None})
    placements = patch._Placements(Session(settings, Context(settings, "cpu", {}), Report({}, "cpu")))
    assert placements.why_not(SimpleNamespace(experts=object())) == (
        "experts are a object: those of a SequentialMLP change places"
    )
    with pytest.raises(RuntimeError, match="use `sharded_state_dict`, which puts them back"):
        patch._refuse()
