"""A calibration: undisturbed times, short trainings forked from one process, and what is left beside operators."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mindspeed_lite.bench.calibration import probe, trainings, worker
from mindspeed_lite.bench.calibration.operators import Case
from mindspeed_lite.bench.calibration.samples import undisturbed
from mindspeed_lite.bench.calibration.trainings import Training
from mindspeed_lite.planner import arguments, calibrated, step_time
from mindspeed_lite.planner.step_time import Pricer

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "pretrain_gpt.py")
# Of a real machine.
MEASURED = json.loads((ROOT / "docs" / "benchmarks" / "predicted-time.json").read_text())["calibration"]
BESIDE = {
    "layer": 4e-3, "microbatch": 3e-3, "step": 1e-2, "slack": {"1": 1.15, "2": 1.4},
    "split": {"tensor parallel": 3e-3, "context parallel": 2e-3, "expert parallel": 5e-3},
}  # fmt: skip


def test_a_disturbed_call_is_not_counted() -> None:
    assert undisturbed([5.0, 1.0, 1.1, 9.0]) == 1.1
    assert undisturbed([2.0]) == 2.0


def test_each_case_is_timed_in_every_pass_over_all_of_them() -> None:
    called: list[str] = []

    def cases() -> Iterator[Case]:
        for name in "ab":
            yield Case((name,), (1.0,), 2.0, lambda name=name: called.append(name))  # type: ignore[misc]

    found = worker.timed(cases, 1e-6)
    assert [(each["key"], each["shape"], each["work"]) for each in found] == [
        (("a",), (1.0,), 2.0),
        (("b",), (1.0,), 2.0),
    ]
    assert all(each["seconds"] > 0 for each in found)
    turns = [name for place, name in enumerate(called) if not place or called[place - 1] != name]
    assert turns == ["a", "b"] * worker.PASSES


def test_trainings_are_forked_and_one_that_fails_says_why(tmp_path: Path) -> None:
    few = probe._words(64, 1, 1)
    given = [Training((*few, "--no-such-flag")), Training(few)]
    wrong, right = trainings.measured_steps(SCRIPT, given, tmp_path / "folder", 3, warmup=1)
    assert isinstance(wrong, str) and "--no-such-flag" in wrong and "\n" not in wrong
    assert not isinstance(right, str) and len(right) == 3 and min(right) > 0
    # The adaptor's features are on: its flags would be unknown otherwise, and the report lists what was replaced.
    lines = [json.loads(line) for file in (tmp_path / "folder" / "1").glob("rank0-*") for line in file.open()]
    (run,) = [each for each in lines if each["kind"] == "run"]
    assert "use_fused_rmsnorm" in run["given"] and run["report"]["entries"]


def test_ranks_end_with_the_first_that_fails_with_their_time_and_with_the_parent() -> None:
    for others, timeout, parent in ((["false"], 60.0, os.getppid()), ([], 0.1, os.getppid()), ([], 60.0, -1)):
        waits = subprocess.Popen(["sleep", "60"])
        others_started = [subprocess.Popen([each]) for each in others]
        began = time.monotonic()
        trainings._wait([waits.pid, *(each.pid for each in others_started)], timeout, parent)
        assert time.monotonic() - began < 20
        with pytest.raises(ProcessLookupError):
            os.kill(waits.pid, 0)


def test_what_trainings_take_beside_operators_is_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps that were made from known overheads give these overheads."""
    measured = {name: each for name, each in MEASURED.items() if name != "overheads"}
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({**measured, "overheads": BESIDE}))

    def steps(script: str, given: Sequence[Training], folder: Path, count: int) -> list[list[float] | str]:
        found: list[list[float] | str] = []
        for each in given:
            pricer = Pricer(calibrated.read(file, each.ranks), measured["overlap"])
            seconds = step_time.step(arguments.read(each.words, each.ranks, "cpu"), pricer).seconds
            found.append([seconds, 3 * seconds, 3 * seconds, seconds])
        return found

    monkeypatch.setattr(probe, "measured_steps", steps)
    found = probe.overheads(measured, SCRIPT)
    assert found["seconds"] >= 0
    # A tiny training's own operators are a small part of it.
    for name in ("layer", "microbatch", "step"):
        assert found[name] == pytest.approx(BESIDE[name], rel=0.1, abs=1e-4), name
    assert found["slack"] == pytest.approx(BESIDE["slack"], rel=0.02)
    assert found["split"] == pytest.approx(BESIDE["split"], rel=0.1)
    alone = probe.overheads({**measured, "cores": 1}, SCRIPT)
    assert [*alone["slack"]] == ["1"] and alone["split"] == {}
    monkeypatch.setattr(probe, "measured_steps", lambda *_: ["it ended"] * 5)
    with pytest.raises(trainings.CalibrationError, match="it ended"):
        probe.overheads({**measured, "cores": 1}, SCRIPT)
