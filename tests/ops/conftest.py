"""torch_npu's stand-in, for the tests of every operator's NPU path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

from mindspeed_lite.ops.dispatch import OPERATORS, operator

from . import twin


@pytest.fixture
def npu_twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[twin.Call]]:
    """torch_npu is the twin within the test; yields the calls that reach it."""
    calls: list[twin.Call] = []
    monkeypatch.setitem(sys.modules, "torch_npu", twin.torch_npu(calls))

    def forget() -> None:
        for name, package in OPERATORS.items():
            sys.modules.pop(f"{package}.npu", None)
            # An import of the backend also leaves it as the package's attribute.
            vars(importlib.import_module(package)).pop("npu", None)
            operator(name).forget()

    forget()
    yield calls
    forget()
