"""Every feature on every release: trained off and on. One older release a day in `make test`, all by `make matrix`."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest

from mindspeed_lite import runtime
from tests.harness import checkouts, matrix, on_and_off
from tests.harness.training import Trainer

TODAY = checkouts.OLDER[datetime.date.today().toordinal() % len(checkouts.OLDER)]


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.only(
        [(TODAY, "plain")], [(release, layout) for release in checkouts.EVERY for layout in on_and_off.LAYOUTS]
    ),
)
def test_features_train_within_their_class(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    features = on_and_off.layouts(release).get(layout, [])
    assert features or layout != "plain"
    if features:
        found = on_and_off.trained(trainer(release), layout, features)
        faults = {name: found[name].fault(on_and_off.numerics_of(runtime.catalogue()[name])) for name in features}
        assert {name: fault for name, fault in faults.items() if fault} == {}


def test_a_fault_is_seen() -> None:
    """A loss or a gradient norm beyond the class, other bits, a missing step and an error each are one."""
    step = [((1.0).hex(), (1.0).hex())]
    other = [((1.0 + 2.0**-7).hex(), (1.0).hex())]
    assert on_and_off.Outcome(step, step).fault("bitwise") == ""
    assert "not the same bits" in on_and_off.Outcome(step, other).fault("bitwise")
    assert "loss 1.0 off" in on_and_off.Outcome(step, other).fault("ulp")
    for numerics in ("ulp", "deviation"):
        wrong = [*step, ((1.0).hex(), (1.5).hex())]
        assert "step 1: gradient norm 1.0 off" in on_and_off.Outcome([*step, *step], wrong).fault(numerics)
    assert on_and_off.Outcome(step, other).fault("deviation") == ""
    assert on_and_off.Outcome(step, step, idle=["adamw"]).fault("bitwise") == "never called: adamw"
    assert "0 steps with it" in on_and_off.Outcome(step, []).fault("deviation")
    assert on_and_off.Outcome(step, step, error="Traceback\nValueError: x").fault("ulp") == "ValueError: x"
