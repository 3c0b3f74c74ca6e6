"""Plans that a chosen one is compared with are within its budget, and what a table says of them is so."""

from __future__ import annotations

import random

import pytest

from benchmarks import adaptive_memory, memory_plans
from benchmarks.memory_plans import CHOSEN, OTHER, Plan
from mindspeed_lite.memory.layer_records import LAYER, NONE, Instant
from mindspeed_lite.memory.layer_ways import Way
from mindspeed_lite.memory.recompute_choice import peak

NOTHING = Way(frozenset(), 100, 0, 0, 0, 0.0)
PART = Way(frozenset({"attention"}), 60, 0, 40, 40, 1.0)
WHOLE = Way(frozenset({LAYER}), 10, 0, 90, 90, 3.0)


@pytest.mark.parametrize("budget", [250, 300, 350, 400])
def test_other_plans_are_within_the_budget(budget: int) -> None:
    options = [[NOTHING, PART, WHOLE]] * 4
    moments = {Instant(NONE, (1, 1, 1, 1)): 0, Instant(3, (1, 1, 1, 1)): 0}
    found = memory_plans.others(options, moments, budget, 4)
    assert 2 <= len(found) <= 4 and all(peak(ways, moments) <= budget for _, ways in found)
    assert found[0][0].startswith("first") and len({name for name, _ in found}) == len(found)
    assert found == memory_plans.others(options, moments, budget, 4)


def test_a_table_compares_with_what_is_within_the_budget_alone() -> None:
    draw = random.Random(1)
    everything = Plan("everything kept", seconds=[1.0], peak=1000)
    chosen = Plan("50%", 500, CHOSEN, [1.1, 1.2, 1.15], 510)
    others = [Plan(f"50%: {n}", 500, OTHER, [1.4 + draw.random()], 480) for n in range(3)]
    too_large = Plan("50%: large", 500, OTHER, [1.01], 600)
    own = [Plan("full", seconds=[1.3], peak=200), Plan("selective", seconds=[1.0], peak=800)]
    impossible = Plan("10%", 100, CHOSEN)
    text = "\n".join(adaptive_memory.table([everything, chosen, impossible, *others, too_large], own))
    # The best of the others is full; the two that take more than the budget do not count.
    assert "- 50%: the budget is kept to (102.0%), 0.885 of the time of the best of 4 other plans." in text
    assert "| 10%, chosen | 0.0 MiB | cannot be met" in text and "49.0%" in text
    chosen.peak, chosen.seconds = 600, [2.0]
    text = "\n".join(adaptive_memory.table([everything, chosen, *others], own))
    assert "NOT kept to" in text and "(MISSED)" in text
