"""The cache's folder: which it is, and which is refused because another user could put code there."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from mindspeed_lite.platform import cache


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the variable names; folders among the temporary files lie beside it."""
    chosen = tmp_path / "chosen"
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(chosen))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    return chosen


def found() -> Path:
    return cache.folder.__wrapped__()


def own(place: Path) -> Path:
    return place.with_name(f"mindspeed_lite-{os.getuid()}")


def test_the_variable_names_it_and_it_is_this_users_alone(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert found() == place and place.stat().st_mode & 0o777 == 0o700 and not caplog.records


def test_a_group_may_share_it(place: Path) -> None:
    place.mkdir()
    place.chmod(0o770)
    assert found() == place


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_every_user_can_write_to_is_refused(
    place: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    place.mkdir()
    place.chmod(mode)
    assert found() == own(place) and own(place).stat().st_mode & 0o777 == 0o700
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{place}: every user can write to it" in record.getMessage() and "\n" not in record.getMessage()


def test_a_folder_of_another_user_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place.mkdir()
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(cache.NoCache, match=r"belongs to another user.*belongs to another user.*may name one"):
        found()
    assert not caplog.records


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_given_to_another_user_is_refused_by_root_too(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    place.mkdir()
    os.chown(place, 12345, -1)
    assert found() == own(place)
    assert f"{place}: it belongs to another user" in caplog.text


def test_the_folder_among_temporary_files_is_judged_alike(place: Path) -> None:
    for each in (place, own(place)):
        each.mkdir()
        each.chmod(0o777)
    with pytest.raises(cache.NoCache, match=r"every user.*every user"):
        found()
