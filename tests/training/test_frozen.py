"""Every feature on models of which a part is frozen, and with LoRA: trained off and on.

In `make test` one rank trains every feature on every kind, and two ranks one kind a day.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest

from mindspeed_lite import runtime
from tests.harness import checkouts, frozen, matrix, on_and_off
from tests.harness.training import Trainer

NEWEST = checkouts.ALL[-1]
# These release what a shared expert keeps; the layout is no other feature's first.
MORE = {"shared experts": ["moe_zero_memory", "recompute_activation_function"]}
ALONE = [layout for layout, (ranks, *_) in on_and_off.LAYOUTS.items() if ranks == 1]
ALIKE = [kind for kind in frozen.KINDS if kind != frozen.DRAWING]
KINDS = {"all": frozen.KINDS, "today's": (ALIKE[datetime.date.today().toordinal() % len(ALIKE)],)}
# Gradients that are few or small have more of their rounding in their norm: as large as that of bf16.
FIRST_NORM = 2.0**-8


@pytest.mark.parametrize(
    ("release", "layout", "kinds"),
    matrix.only(
        [(NEWEST, layout, "all" if layout in ALONE else "today's") for layout in on_and_off.LAYOUTS],
        [
            *((NEWEST, layout, "today's") for layout in on_and_off.LAYOUTS if layout not in ALONE),
            *((release, layout, "all") for release in checkouts.EVERY for layout in on_and_off.LAYOUTS),
        ],
    ),
)
def test_features_train_a_model_of_which_a_part_is_frozen(
    trainer: Callable[[str], Trainer], release: str, layout: str, kinds: str
) -> None:
    features = on_and_off.layouts(release).get(layout, []) + MORE.get(layout, [])
    fits = [kind for kind in KINDS[kinds] if layout in ALONE or kind in ALIKE]
    rows = [f"{feature}{on_and_off.FROZEN}{kind}" for kind in fits for feature in features]
    if rows:
        found = on_and_off.trained(trainer(release), layout, rows)
        numerics = {feature: on_and_off.numerics_of(runtime.catalogue()[feature]) for feature in features}
        faults = {
            row: each.fault(numerics[row.partition(on_and_off.FROZEN)[0]], FIRST_NORM) for row, each in found.items()
        }
        assert {row: fault for row, fault in faults.items() if fault} == {}
