"""Features off for generation and on again for training, as reinforcement learning has it, over one model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import checkouts, matrix, switching
from tests.harness.training import Trainer


@pytest.mark.parametrize("release", matrix.only(["0.19.2"], checkouts.ALL))
def test_training_goes_on_as_if_never_switched(trainer: Callable[[str], Trainer], release: str, tmp_path: Path) -> None:
    argv = [str(Path(switching.__file__)), str(tmp_path)]
    trainer(release).run(entry="script", arm="device", nproc=1, argv=argv).check()
    found = json.loads((tmp_path / "switched.json").read_text())
    assert found["faults"] == []
    # The heap settles within some switches; then 1 MB more would be a weight's copy a switch.
    settled = found["resident"][switching.CYCLES // 2 :]
    assert len(found["resident"]) == switching.CYCLES and max(settled) - min(settled) < 4e6, found["resident"]
