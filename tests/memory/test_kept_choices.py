"""Choices that are kept for later runs: by budget, read as written, and damaged ones logged."""

from __future__ import annotations

from mindspeed_lite.memory.kept_choices import KeptChoices
from mindspeed_lite.platform import cache


def test_a_choice_is_read_as_written_and_another_budget_finds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    logged: list[str] = []
    kept, other = (KeptChoices("memory-ab", budget, logged.append) for budget in (2**30, 2**31))
    assert kept.read() is None and kept.read_other() == ("", {})
    choice = {0: [(frozenset({"mlp", "norm"}), frozenset()), (frozenset(), frozenset({"attention"}))], 1: []}
    kept.write(choice)
    assert kept.read() == choice and kept.read_other() == ("", {})
    what, found = other.read_other()
    assert found == choice and "1.000 GiB" in what
    (tmp_path / kept.name).write_text("{}")
    assert kept.read() is None and len(logged) == 1 and kept.name in logged[0]
