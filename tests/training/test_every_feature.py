"""Every feature, off and on, on every release, and on models of which a part is frozen or has adapters (LoRA).

In `make test` one older release a day trains a layout; the newest trains every feature on one kind of frozen model a
day, and on adapters with dropout. All by `make test-whole`, all releases by `make matrix`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest

from mindspeed_lite import runtime
from tests.harness import checkouts, frozen, matrix, on_and_off
from tests.harness.feature_layouts import LAYOUTS
from tests.harness.rows import options_of, ranks_of
from tests.harness.training import FIRST_NORM, Trainer

NEWEST = checkouts.ALL[-1]
ALONE = [layout for layout, words in LAYOUTS.items() if ranks_of(options_of(words)) == 1]
SAME_DRAWS = [kind for kind in frozen.KINDS if kind != frozen.DRAWING]
TODAYS = SAME_DRAWS[datetime.date.today().toordinal() % len(SAME_DRAWS)]
KINDS = {"whole": ("",), "all": frozen.KINDS, "today's": (TODAYS, frozen.DRAWING)}
# These release what a shared expert keeps; the layout is no other feature's first.
MORE = {"shared experts": ["moe_zero_memory", "recompute_activation_function"]}
ROWS = [
    *((release, layout, "whole") for release in checkouts.EVERY for layout in LAYOUTS),
    *((NEWEST, layout, "today's") for layout in LAYOUTS),
    *((release, layout, "all") for release in checkouts.EVERY for layout in LAYOUTS),
]
QUICK = [(checkouts.TODAY, "plain", "whole"), *((NEWEST, layout, "today's") for layout in LAYOUTS)]


@pytest.mark.parametrize(("release", "layout", "kinds"), matrix.only(QUICK, ROWS))
def test_features_train_within_their_class(
    trainer: Callable[[str], Trainer], release: str, layout: str, kinds: str
) -> None:
    features = on_and_off.layouts(release).get(layout, [])
    assert features or layout != "plain"
    features += MORE.get(layout, []) if kinds != "whole" else []
    # Gradients that are few or small have more of their rounding in their norm: as large as that of bf16.
    first_norm = FIRST_NORM if kinds == "whole" else 2.0**-8
    faults = {
        f"{feature} {kind}": fault
        for kind in KINDS[kinds]
        if layout in ALONE or kind != frozen.DRAWING
        for feature in features
        if (
            fault := on_and_off.train(trainer(release), layout, feature, kind).fault(
                on_and_off.numerics_of(runtime.catalogue()[feature]), first_norm
            )
        )
    }
    assert faults == {}


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
    assert on_and_off.Outcome(step, step, idle=("adamw",)).fault("bitwise") == "never called: adamw"
    assert "0 steps with it" in on_and_off.Outcome(step, []).fault("deviation")
    assert on_and_off.Outcome(step, step, error="rank 0 ended with 1: x").fault("ulp") == "rank 0 ended with 1: x"
