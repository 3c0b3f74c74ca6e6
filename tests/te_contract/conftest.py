"""The stand-in on the path of one test, and trainers on whose path it is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import checkouts
from tests.harness.training import Trainer

STAND_IN = Path(__file__).parent / "stand_in"
_NAMES = ("transformer_engine", "transformer_engine_torch")
# What `log_delayed` logs.
DELAYED = tuple(f"{name} gives up its gradients" for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))


def log_delayed() -> None:
    """Before features are on: log which layers' weight gradients a schedule takes."""
    from mindspeed_lite.patches import delay_wgrad_compute as patch

    queue, complete, chosen = patch._queue, patch._complete_wrappers, set()

    def _queue(session: Any, layer: Any) -> None:
        queue(session, layer)
        chosen.add(layer)

    def _complete_wrappers(session: Any, module: torch.nn.Module) -> None:
        complete(session, module)
        for name, layer in module.named_modules():
            if layer in chosen:
                print(f"{name.rpartition('.')[2]} gives up its gradients", flush=True)

    patch._queue, patch._complete_wrappers = _queue, _complete_wrappers


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Any]]:
    """`imported(folder)`: `transformer_engine.pytorch` of a folder, forgotten at the next call and after the test."""

    def forget() -> None:
        for name in [each for each in sys.modules if each.partition(".")[0] in _NAMES]:
            del sys.modules[name]

    def of(folder: Path) -> Any:
        forget()
        monkeypatch.syspath_prepend(folder)
        return importlib.import_module("transformer_engine.pytorch")

    yield of
    forget()


@pytest.fixture(scope="module")
def te_trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Trainer]]:
    """`te_trainer(release)`, of Megatron's core, with the stand-in on its path; the newest and the last stay open."""
    open_ones: dict[str, Trainer] = {}

    def of(release: str) -> Trainer:
        if release not in open_ones:
            for other in {*open_ones} - {checkouts.ALL[-1]} if release != checkouts.ALL[-1] else ():
                open_ones.pop(other).close()
            try:
                target = checkouts.folder(release)
            except ValueError as error:
                pytest.skip(str(error))
            scratch = tmp_path_factory.mktemp(f"te-{release}")
            open_ones[release] = Trainer(target, scratch, training=False, packages=str(STAND_IN))
        return open_ones[release]

    yield of
    for each in open_ones.values():
        each.close()
