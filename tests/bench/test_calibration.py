"""A calibration: every operator has a time, a failed process is one line, overheads follow a module call's cost."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_lite.bench import calibration
from mindspeed_lite.bench.calibration import operators
from mindspeed_lite.planner.calibrated import _SIZES


def test_every_operator_runs_and_has_the_shape_that_the_planner_reads() -> None:
    seen = set()
    for key, shape, work, run in operators.cases():
        assert len(shape) == _SIZES.get(key[0], 1) and work >= 1
        if key not in seen:
            seen.add(key)
            run()
    names = {key[0] for key in seen}
    assert names == {
        *("product", "grouped", "scores", "flash", "optimizer", "norm", "activation", "rope", "loss", "residual"),
        *("embedding", "permute", "router", "latent", "accumulate"),
    }
    assert {("norm", "fused", "backward", "2"), ("product", "weight_grad", "4"), ("optimizer", "fused")} <= seen
    assert ("embedding", "plain", "backward", "2") not in seen


def test_times_are_positive_and_overheads_follow_the_cost_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "cases", lambda: iter([(("a",), (1.0,), 2.0, lambda: None)]))
    told = []
    (found,) = calibration.time_operators(1e-3, lambda done, name: told.append((done, name)))
    assert told == [(0, " ".join(found["key"]))]
    assert found["seconds"] > 0 and (found["key"], found["shape"], found["work"]) == (("a",), (1.0,), 2.0)
    monkeypatch.setattr(calibration, "_median_seconds", lambda run, seconds: 50e-5)
    expected = {name: calls * 1e-5 for name, calls in calibration.HOST_CALLS.items()}
    assert calibration.host_overheads() == pytest.approx(expected)


def test_a_process_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **options: Any) -> None:
        raise calibration.ProcessRaisedException("\n-- Process 1 --\nTraceback\nMemoryError: no room\n", 1, 2)

    monkeypatch.setattr(calibration, "spawn", fails)
    with pytest.raises(calibration.CalibrationError, match=r"^a process failed: MemoryError: no room$"):
        calibration.measure(2, 1.0)
