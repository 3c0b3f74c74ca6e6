"""The same calls through the wheel's own C++ code."""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu_contract.checks import problems, same_call
from tests.npu_contract.operators import CASES

Records = dict[str, Any]


@pytest.mark.parametrize("name", CASES)
def test_the_wheels_own_checks_pass_and_the_contract_holds(on_npu: Records, on_host: Records, name: str) -> None:
    record = on_host["cases"]["host"][name]
    assert problems(CASES[name], record) == []
    fake = on_npu["cases"]["fake"][name]
    for own, other in zip(record["forward"], fake["forward"], strict=True):
        assert same_call(own, other) == []
