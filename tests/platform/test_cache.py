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


@pytest.mark.parametrize(
    ("mode", "who"),
    [(0o777, "every user"), (0o1777, "every user"), (0o702, "every user"), (0o770, "its group"), (0o3775, "its group")],
)
def test_a_folder_that_others_can_write_to_is_refused(
    place: Path, caplog: pytest.LogCaptureFixture, mode: int, who: str
) -> None:
    place.mkdir()
    place.chmod(mode)
    assert found() == own(place) and own(place).stat().st_mode & 0o777 == 0o700
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{place}: {who} can write to it" in record.getMessage() and "\n" not in record.getMessage()


@pytest.mark.parametrize("is_link", [False, True], ids=["folder", "link"])
def test_a_folder_that_every_user_can_exchange_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_link: bool
) -> None:
    shared = tmp_path / "shared"
    target = shared / "between" / "cache"
    target.mkdir(parents=True)
    place.symlink_to(target)
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(place if is_link else target))
    for mode, expected in ((0o1777, place if is_link else target), (0o777, own(place))):
        shared.chmod(mode)
        assert found() == expected
    assert f"every user can put another in its place (chmod +t or o-w {shared} makes it usable)" in caplog.text


def test_without_a_folder_for_temporary_files_there_is_still_a_reason(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(cache.tempfile, "gettempdir", missing)
    assert found() == place
    place.chmod(0o777)
    with pytest.raises(cache.NoCache, match=r"every user can write.*No usable temporary directory"):
        found()


def test_a_folder_of_another_user_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place.mkdir()
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(cache.NoCache, match=r"belongs to another user.*belongs to another user.*may name one"):
        found()
    assert not caplog.records
