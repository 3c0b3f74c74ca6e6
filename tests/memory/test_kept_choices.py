"""Choices that are kept for later runs: read as written, and damaged ones logged."""

from __future__ import annotations

from mindspeed_lite.memory import kept_choices
from mindspeed_lite.platform import cache


def test_a_choice_is_read_as_written(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    logged: list[str] = []
    assert kept_choices.read("a.json", logged.append) is None
    choice = {0: [(frozenset({"mlp", "norm"}), frozenset()), (frozenset(), frozenset({"attention"}))], 1: []}
    kept_choices.write("a.json", choice)
    assert kept_choices.read("a.json", logged.append) == choice and not logged
    (tmp_path / "a.json").write_text("{}")
    assert kept_choices.read("a.json", logged.append) is None and len(logged) == 1 and "a.json" in logged[0]
