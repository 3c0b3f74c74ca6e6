"""The stand-in on the path of one test, and trainers on whose path it is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import checkouts
from tests.harness.training import Trainer

STAND_IN = Path(__file__).parent / "stand_in"
_NAMES = ("transformer_engine", "transformer_engine_torch")


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Any]]:
    """`imported(folder)`: the package `transformer_engine.pytorch` of a folder, forgotten after the test."""

    def of(folder: Path) -> Any:
        monkeypatch.syspath_prepend(folder)
        return importlib.import_module("transformer_engine.pytorch")

    yield of
    for name in [each for each in sys.modules if each.partition(".")[0] in _NAMES]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def te_trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Trainer]]:
    """`te_trainer(release)`, of Megatron's core alone, the last one open; it has the stand-in on its path."""
    open_ones: dict[str, Trainer] = {}

    def of(release: str) -> Trainer:
        if release not in open_ones:
            for other in [*open_ones]:
                open_ones.pop(other).close()
            scratch = tmp_path_factory.mktemp(f"te-{release}")
            open_ones[release] = Trainer(checkouts.folder(release), scratch, training=False, packages=str(STAND_IN))
        return open_ones[release]

    yield of
    for each in open_ones.values():
        each.close()
