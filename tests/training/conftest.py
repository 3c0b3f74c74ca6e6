"""Sorts tests by release, so that each release's training server is started once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import checkouts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """This folder's tests in the order of their `release`; Megatron takes seconds to import."""
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if item.path.is_relative_to(here)]
    ordered = sorted((items[place] for place in places), key=_release)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _release(item: pytest.Item) -> int:
    parameters = getattr(item, "callspec", None)
    release = parameters.params.get("release") if parameters is not None else None
    return checkouts.EVERY.index(release or checkouts.installed())
