"""Every benchmark runs at a tiny size and writes its page; the standing page is what its reports say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks.__main__ import keep, page_of
from benchmarks.agreement import worst
from benchmarks.configurations import CONFIGURATIONS
from lab import namespaces
from tests.harness import matrix
from tests.harness.commands import python

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "docs" / "benchmarks" / "cpu"
FOLDER = ROOT / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if "BENCHMARK = Benchmark(" in path.read_text())


@matrix.whole
@pytest.mark.parametrize("name", [*NAMES, "expert_balance --feature enable_expert_placement", ""])
def test_a_tiny_run_writes_its_page(tmp_path, name):
    if name == "rank_order" and not namespaces.available():
        pytest.skip("needs root and tc")
    page, (module, *options) = (
        tmp_path / "page.md",
        f"{name} --tiny --page".split() if name else ["", "--tiny", "--page"],
    )
    ran = python("-m", f"benchmarks.{module}".rstrip("."), *options, str(page), cwd=ROOT, path=[ROOT], timeout=900)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    text = page.read_text()
    assert text.startswith("# ") and text.count("\n| ") >= 3 and "DIFFER" not in text


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_one_line(name, capsys):
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    assert benchmark.name == name and {*benchmark.tiny} <= {*benchmark.options}
    with pytest.raises(SystemExit):
        benchmark.main(["--no-such-option"])
    assert f"python -m benchmarks.{name}: error: unrecognized arguments" in capsys.readouterr().err


def test_losses_are_shown_at_their_worst():
    rows = json.loads((KEPT.parent / "agreement.json").read_text())
    found = {(row["features"], row["steps"]): row for row in worst(rows)}
    for row in rows:
        assert row["share"] <= found[row["features"], row["steps"]]["share"]


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
