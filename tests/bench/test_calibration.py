"""A calibration: every operator has a time, a failed process is one line, overheads follow a module call's cost."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_lite.bench.calibration import measure, operators
from mindspeed_lite.bench.calibration.operators import OperatorCase
from mindspeed_lite.planner.calibrated import _SIZES


def test_every_operator_runs_and_has_the_shape_that_the_planner_reads() -> None:
    seen = set()
    for case in operators.cases():
        assert len(case.shape) == _SIZES.get(case.key[0], 1) and case.work >= 1
        if case.key not in seen:
            seen.add(case.key)
            case.run()
    names = {key[0] for key in seen}
    assert names == {
        *("product", "grouped", "scores", "flash", "optimizer", "norm", "activation", "rope", "loss", "residual"),
        *("embedding", "permute", "router", "latent", "accumulate"),
    }
    assert {("norm", "fused", "backward", "2"), ("product", "weight_grad", "4"), ("optimizer", "fused")} <= seen
    assert ("embedding", "plain", "backward", "2") not in seen


def test_times_are_positive_and_overheads_follow_the_cost_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "cases", lambda: iter([OperatorCase(("a",), (1.0,), 2.0, lambda: None)]))
    (found,) = measure.time_operators(1e-3)
    assert found["seconds"] > 0 and (found["key"], found["shape"], found["work"]) == (("a",), (1.0,), 2.0)
    monkeypatch.setattr(measure, "_median_seconds", lambda run, seconds: 50e-5)
    assert measure.host_overheads() == pytest.approx({name: calls * 1e-5 for name, calls in measure.HOST_CALLS.items()})


def test_a_process_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **options: Any) -> None:
        raise measure.ProcessRaisedException("\n-- Process 1 --\nTraceback\nMemoryError: no room\n", 1, 2)

    monkeypatch.setattr(measure, "spawn", fails)
    with pytest.raises(measure.CalibrationError, match=r"^a process failed: MemoryError: no room$"):
        measure.measure(2, 1.0)
