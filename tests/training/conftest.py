"""One training server per release, started when a test first asks for it; tests are sorted so that it is once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import releases

from .jobs import Trainer


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
    return releases.ALL.index(release or releases.installed())


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Trainer]]:
    """`trainer(release)`; the last one used stays, the one before it is closed (each holds half a gigabyte)."""
    open_one: dict[str, Trainer] = {}

    def of(release: str) -> Trainer:
        if release not in open_one:
            for other in list(open_one):
                open_one.pop(other).close()
            target = releases.folder(release)
            if target is not None and not target.is_dir():
                pytest.fail(f"megatron-core {release} is not prepared: run `python -m tests.releases`")
            scratch = tmp_path_factory.mktemp(f"megatron-{release}")
            open_one[release] = Trainer(target, scratch, training=release in releases.WITH_TRAINING)
            # Some wheels name the commit they were built from.
            assert open_one[release].version.partition("+")[0] == release
        return open_one[release]

    yield of
    for each in open_one.values():
        each.close()
