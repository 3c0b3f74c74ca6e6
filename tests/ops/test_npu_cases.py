"""What the self-test computes on an NPU, on the emulation of torch_npu's documentation (see twin)."""

from __future__ import annotations

import pytest

from mindspeed_lite.bench.selftest import OK, numerics
from mindspeed_lite.ops.case import Problem
from mindspeed_lite.ops.discovery import OPERATORS
from mindspeed_lite.ops.dispatch import operator

from . import twin

CASES = [case for case in numerics.problems("cpu", False, "npu") if "npu" in operator(case.operator).backends]


def test_every_operator_with_an_npu_backend_declares_some() -> None:
    assert {case.operator for case in CASES} == {name for name in OPERATORS if "npu" in operator(name).backends}


@pytest.mark.parametrize("case", CASES, ids=[f"{case.operator} {case.name}" for case in CASES])
def test_the_npu_backend_takes_the_case_and_computes_it(npu_twin: list[twin.Call], case: Problem) -> None:
    outcome = numerics.judge(case, "npu")
    assert outcome.status == OK, outcome.text
