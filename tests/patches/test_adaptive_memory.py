"""`--adaptive-memory`: its flags, and when it does not apply; its steps are in `_shared/test_memory_choice.py`."""

from __future__ import annotations

import importlib.util

import pytest

from mindspeed_lite.engine import Context, OptionError, Settings, automatic_reasons
from mindspeed_lite.patches.adaptive_memory import FEATURE
from tests.harness.swapped import reasons

ON = {"adaptive_memory": True, "memory_budget": 1.0}


def context(settings=None, **args):
    return Context(Settings(ON if settings is None else settings), "cpu", {}, args)


@pytest.fixture
def solver(monkeypatch):
    """What finds modules; scipy is there."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl transformer_engine"),
        ({"recompute_granularity": "selective"}, "--recompute-granularity"),
        ({"overlap_moe_expert_parallel_comm": True}, "in pieces"),
        ({"fp8": "hybrid"}, "--fp8-format"),
    ],
)
def test_what_it_leaves_alone(args, text):
    (reason,) = reasons(FEATURE, context(**args))
    assert text in reason


@pytest.mark.usefixtures("solver")
def test_what_its_flags_say():
    assert reasons(FEATURE, context()) == [] == reasons(FEATURE, context({}))
    assert FEATURE.enabled(Settings({"mindspeed_lite_explain_memory": True})) and not FEATURE.enabled(Settings({}))
    for budget in (None, 0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(OptionError, match="--memory-budget"):
            FEATURE.condition(context({**ON, "memory_budget": budget}))


def test_a_budget_alone_is_refused():
    alone = context({"memory_budget": 4.0})
    assert FEATURE.is_enabled(alone.settings)
    with pytest.raises(OptionError, match=r"--memory-budget 4.0 has no effect without --adaptive-memory: add it"):
        FEATURE.condition(alone)


def test_without_a_solver_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"scipy.*pip install mindspeed-lite\[adaptive\]"):
        FEATURE.condition(context())


@pytest.mark.usefixtures("solver")
def test_auto_leaves_it_off():
    (left_off,) = automatic_reasons([FEATURE], context())[FEATURE.name]
    assert "memory" in left_off
