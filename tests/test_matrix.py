"""`python -m tools.matrix`: what it says of a tag's script, from what two trainings left; bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.training import Result
from tools import matrix

LOSSES = (5.5, 5.25, 5.0)


class _Trainer:
    """Gives back what a script without features and one with auto would have left."""

    def __init__(self, scratch: Path, on: list[dict[str, float]], entries: list[dict[str, Any]], code: int) -> None:
        self.scratch, self.on, self.entries, self.code = scratch, on, entries, code

    def run(self, argv: list[str], **job: Any) -> Result:
        report = "--mindspeed-lite-report" in argv
        out = self.scratch / f"{report}"
        out.mkdir()
        steps = self.on if report else [{"lm loss": loss, "grad norm": 1.0} for loss in LOSSES]
        exact = [{name: value.hex() for name, value in step.items()} for step in steps]
        (out / "rank0.json").write_text(json.dumps(exact))
        (out / "rank0.log").write_text("Traceback\nValueError: x\n")
        if report:
            Path(argv[-1]).write_text(json.dumps({"entries": self.entries}))
        return Result([self.code if report else 0], 0.0, out)


@pytest.mark.parametrize(
    ("norm", "steps", "reasons", "code", "fault"),
    [
        (1.0, 3, ["no experts"], 0, ""),
        (1.0, 3, [], 0, "left off without a reason: b"),
        (1.0, 2, ["no experts"], 0, "2 losses of 3 steps"),
        (1.5, 3, ["no experts"], 0, "step 0: gradient norm 1.0 off, 1.5 on: 0.5, and 0.00098 is allowed"),
        (1.0, 3, ["no experts"], 1, "auto: rank 0 ended with 1: ValueError: x"),
    ],
)
def test_what_is_wrong_with_a_script(
    tmp_path: Path, norm: float, steps: int, reasons: list[str], code: int, fault: str
) -> None:
    on = [{"lm loss": loss, "grad norm": norm} for loss in LOSSES[:steps]]
    entries = [
        {"feature": "device_cpu", "status": "applied", "reasons": []},
        {"feature": "a", "status": "applied", "reasons": []},
        {"feature": "b", "status": "skipped", "reasons": reasons},
    ]
    trainer: Any = _Trainer(tmp_path, on, entries, code)
    row = matrix.script_row(trainer, tmp_path, "single")
    assert row["fault"] == fault
    assert row == {"fault": fault, "on": 0} if code else row == {"fault": fault, "on": 1, "drift": 0.0}
