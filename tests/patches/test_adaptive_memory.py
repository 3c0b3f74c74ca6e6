"""`--adaptive-memory`: its flags, and when it does not apply; its steps are in `_shared/test_memory_choice.py`."""

from __future__ import annotations

import importlib.util

import pytest

from mindspeed_lite.engine import Context, OptionError, Settings
from mindspeed_lite.patches.adaptive_memory import FEATURE


def test_without_a_solver_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"scipy.*pip install mindspeed-lite\[adaptive\]"):
        FEATURE.condition(Context(Settings({"adaptive_memory": True, "memory_budget": 1.0}), "cpu", {}, {}))
