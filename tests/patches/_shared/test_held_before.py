"""What a feature holds on to while it is off: living objects only, each feature its own."""

from __future__ import annotations

import gc

from mindspeed_lite.patches._shared.held_before import held_before


class Held: ...


def test_living_objects_are_found_again_and_dead_ones_are_not() -> None:
    kept, dropped = Held(), Held()
    held_before("a")[kept] = 1
    held_before("a")[dropped] = 2
    del dropped
    gc.collect()
    assert [*held_before("a").items()] == [(kept, 1)]
    assert not held_before("b")
