"""The page of the standing benchmarks, and what a run replaces."""

import json
from pathlib import Path

import pytest

from benchmarks.configurations import CONFIGURATIONS
from benchmarks.run import keep, page_of

KEPT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "cpu"


def test_the_page_of_the_cpu_is_what_its_reports_say():
    assert page_of(CONFIGURATIONS["cpu"], KEPT) == KEPT.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize("complete", [True, False, None])
def test_a_run_that_ended_early_replaces_no_report(tmp_path, complete):
    scratch, kept = tmp_path / "scratch", tmp_path / "kept"
    for folder, text in ((scratch, "new"), (kept, "old")):
        folder.mkdir()
        (folder / "report.md").write_text(text)
    if complete is not None:
        (scratch / "report.json").write_text(json.dumps({"complete": complete}))
    keep(scratch, kept)
    assert (kept / "report.md").read_text() == ("new" if complete else "old")
