"""Launch scripts as MindSpeed-LLM ships them: flags untouched, small sizes, nothing lost in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_lite.migration import flags
from tests.harness.mindspeed_scripts import MOCK, SCRIPTS
from tests.harness.script_trainings import SCRIPT, lm_losses
from tests.harness.training import Trainer


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_shipped_script_starts(trainer: Callable[[str], Trainer], name: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    argv = [SCRIPT, *SCRIPTS[name], *MOCK, "--mindspeed-lite-report", str(report)]
    result = trainer("0.19.2").run(entry="script", arm="adaptor", nproc=1, argv=argv).check()
    losses = lm_losses(result)
    assert len(losses) == 3 and all(0 < loss < 7 for loss in losses)
    notices = json.loads(report.read_text())["notices"]
    for row in flags().values():
        # What neither Megatron nor a feature of ours has under this name is in the report, once.
        if row.flag in SCRIPTS[name] and row.outcome not in ("keep", "rule"):
            if row.outcome == "choose":
                value = SCRIPTS[name][[*SCRIPTS[name]].index(row.flag) + 1]
                if f"{value}>" not in row.words:
                    continue  # Megatron takes this value as it is
            found = [text for text in notices if text.partition(" ")[0] == row.flag]
            assert len(found) == 1 or row.flag == "--moe-permute-fusion", (row.flag, notices)
