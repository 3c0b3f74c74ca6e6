"""A report's files: whole or not at all, JSON that every reader takes, an unwritable folder said in time."""

import json

import pytest

from mindspeed_lite.bench import output, plots, report


@pytest.fixture(autouse=True)
def renderers(monkeypatch):
    """Placeholders, so that this file tests the writing alone."""
    monkeypatch.setattr(plots, "draw", lambda record, folder: {"time.png": "<svg>"})
    monkeypatch.setattr(report, "render", lambda record, pictures, html: f"# {[*pictures]}")


def test_what_is_not_finite_becomes_text():
    inf = float("inf")
    text = output.dumps({"a": [float("nan"), inf, (-inf, 1.5)], "b": {"c": inf}, "d": "nan", "e": None, "f": True})
    assert json.loads(text) == {"a": ["nan", "inf", ["-inf", 1.5]], "b": {"c": "inf"}, "d": "nan", "e": None, "f": True}
    assert "NaN" not in text and "Infinity" not in text


def test_writes_every_file_and_names_the_plots(tmp_path):
    names = output.write({"kind": "bench-ops"}, str(tmp_path))
    assert names == ["report.json", "report.md", "report.html", "time.png"]
    assert json.loads((tmp_path / "report.json").read_text())["files"]["plots"] == ["time.png"]
    assert (tmp_path / "report.md").read_text() == "# ['time.png']"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]


def test_a_renderer_that_fails_costs_no_measurement(tmp_path, monkeypatch):
    def fails(record, pictures, html):
        raise RuntimeError("no")

    monkeypatch.setattr(report, "render", fails)
    with pytest.raises(RuntimeError):
        output.write({"kind": "bench-ops"}, str(tmp_path))
    assert json.loads((tmp_path / "report.json").read_text())["kind"] == "bench-ops"


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    output.write_file(file, "old")

    def fails(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(output.os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        output.write_file(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_a_folder_is_made_and_left_empty_or_one_clear_error(tmp_path):
    output.check_writable(str(tmp_path / "a" / "b"))
    assert not list((tmp_path / "a" / "b").iterdir())
    (tmp_path / "file").write_text("")
    for path in ("file", "file/below"):
        with pytest.raises(output.OutputError, match=r"--out: cannot write into .*; give a folder"):
            output.check_writable(str(tmp_path / path))
