"""Undo on live models: every feature of the catalogue is on in a training that began without it, or goes on without it.

`tests.harness.live_undo` trains and compares; a feature that is new is found and trained in the first layout it fits.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.engine import Feature
from tests.harness import checkouts, live_undo, matrix, on_and_off, switching
from tests.harness.feature_layouts import UNDONE, why_not
from tests.harness.rows import options_of, ranks_of
from tests.harness.training import Trainer


def undone_in(feature: Feature) -> str | None:
    """The first layout in which a feature can be had."""
    return next((each for each in UNDONE if not why_not(feature, each)), None)


# One place a day in which a step is cut short; all in `make test-whole`.
TODAYS = [datetime.date.today().toordinal() % len(live_undo.CUTS)]


def faults(
    trainer: Trainer, layout: str, features: list[str], out: Path, cuts: Sequence[int] = range(len(live_undo.CUTS))
) -> dict[str, list[str]]:
    """What did not hold, by rank and feature."""
    ranks = ranks_of(options_of(UNDONE[layout]))
    script = str(Path(live_undo.__file__))
    trainer.run(
        entry="script",
        arm="device",
        nproc=ranks,
        timeout=1200,
        argv=[script, str(out), layout, "".join(map(str, cuts)), *features],
    ).check()
    found = {rank: json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)}
    assert all([*each] == features for each in found.values())
    return {
        f"{feature} on rank {rank}": texts for rank, each in found.items() for feature, texts in each.items() if texts
    }


@pytest.mark.parametrize("layout", UNDONE)
def test_a_model_trains_on_as_if_no_feature_had_ever_been(
    trainer: Callable[[str], Trainer], layout: str, tmp_path: Path
) -> None:
    features = [each.name for each in runtime.catalogue() if undone_in(each) == layout]
    assert features, "no feature needs this layout"
    assert faults(trainer(checkouts.installed()), layout, features, tmp_path, TODAYS) == {}


@matrix.whole
@pytest.mark.parametrize("layout", UNDONE)
@pytest.mark.parametrize("release", checkouts.ALL)
def test_so_it_does_in_every_layout_and_release(
    trainer: Callable[[str], Trainer], release: str, layout: str, tmp_path: Path
) -> None:
    features = [each.name for each in runtime.catalogue() if not why_not(each, layout)]
    assert faults(trainer(release), layout, features, tmp_path) == {}


def test_what_cannot_be_trained_here_says_why() -> None:
    reasons = {each.name: why_not(each, "tensor") for each in runtime.catalogue() if not undone_in(each)}
    # Some are trained off and on in layouts of their own; each of the others says what it lacks here.
    alone = {name for name in reasons if on_and_off.layout_of(runtime.catalogue()[name])}
    assert {"pipeline_schedule", "schedules_method"} <= alone and all(reasons.values())
    for name in reasons.keys() - alone:
        assert runtime.catalogue()[name].patches or reasons[name] == ["it swaps nothing"]
    assert reasons["use_ascend_mc2"][0].startswith("the operators are CANN's, for an NPU, and the device is cpu")


@pytest.mark.parametrize("release", matrix.only(["0.19.2"], checkouts.ALL))
def test_training_goes_on_as_if_never_switched(trainer: Callable[[str], Trainer], release: str, tmp_path: Path) -> None:
    """Features off for generation and on again for training, as reinforcement learning has it, over one model."""
    argv = [str(Path(switching.__file__)), str(tmp_path)]
    trainer(release).run(entry="script", arm="device", nproc=1, argv=argv).check()
    found = json.loads((tmp_path / "switched.json").read_text())
    assert found["faults"] == []
    # The heap settles within some switches; then 1 MB more would be a weight's copy a switch.
    settled = found["resident"][switching.CYCLES // 2 :]
    assert len(found["resident"]) == switching.CYCLES and max(settled) - min(settled) < 4e6, found["resident"]
