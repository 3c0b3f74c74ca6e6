"""The operators' own cases (`mindspeed_lite/ops/<op>/cases.py`) on the real wheel: every call keeps its contract."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_lite.bench.selftest import numerics
from mindspeed_lite.ops.dispatch import operator
from tests.npu_contract.operators import CASES, violations

Records = dict[str, Any]

NAMES = [
    f"{case.operator} {case.name}"
    for case in numerics.problems("cpu", True, "npu")
    if "npu" in operator(case.operator).backends
]


def _problems(record: Any) -> list[str]:
    """The error if there was one, and every documented sentence that a call breaks."""
    found = [violation for call in record["calls"] for violation in violations(call)]
    return [record["error"], *found] if record["error"] else found


@pytest.mark.parametrize("which", ["fake", "content"])
@pytest.mark.parametrize("name", NAMES)
def test_the_calls_keep_their_contracts(on_npu: Records, name: str, which: str) -> None:
    assert _problems(on_npu["declared"][which][name]) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_wheels_own_checks_pass(on_host: Records, name: str) -> None:
    assert _problems(on_host["declared"]["host"][name]) == []


@pytest.mark.parametrize("name", sorted({case.operator for case in CASES.values()}))
def test_every_operator_of_torch_npus_is_reached(on_npu: Records, name: str) -> None:
    records = on_npu["declared"]["fake"]
    assert any(records[each]["calls"] for each in NAMES if each.startswith(f"{name} "))
