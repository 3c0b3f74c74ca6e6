"""Plans that a chosen one is compared with are within its budget, and what a table says of them is so."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from benchmarks import adaptive_memory, memory_plans
from benchmarks.memory_plans import CHOSEN, OTHER, Plan
from mindspeed_lite.memory.layer_records import LAYER, NONE, Instant
from mindspeed_lite.memory.memory_options import LayerOption
from mindspeed_lite.memory.recompute_choice import peak
from tests.harness import matrix

NOTHING = LayerOption(frozenset(), 100, 0, 0, 0, 0.0)
PART = LayerOption(frozenset({"attention"}), 60, 0, 40, 40, 1.0)
WHOLE = LayerOption(frozenset({LAYER}), 10, 0, 90, 90, 3.0)


@pytest.mark.parametrize("budget", [250, 300, 350, 400])
def test_other_plans_are_within_the_budget(budget: int) -> None:
    options = [[NOTHING, PART, WHOLE]] * 4
    moments = {Instant(NONE, (1, 1, 1, 1)): 0, Instant(3, (1, 1, 1, 1)): 0}
    found = memory_plans.others(options, moments, budget, 8)
    names = [name for name, _ in found]
    assert 4 <= len(found) <= 8 and all(peak(ways, moments) <= budget for _, ways in found)
    assert names[0].startswith("first") and names[1].startswith("last") and len({*names}) == len(found)
    assert "the cheapest bytes first" in names
    assert found == memory_plans.others(options, moments, budget, 8)


def test_the_cheapest_bytes_go_first() -> None:
    moments = {Instant(NONE, (1, 1)): 0}
    ways = memory_plans._cheapest([[NOTHING, PART, WHOLE]] * 2, (NOTHING, NOTHING), moments, 130)
    assert ways == (PART, PART) or sorted(way.kept for way in ways or ()) == [60, 60]
    assert memory_plans._cheapest([[NOTHING]], (NOTHING,), {Instant(NONE, (1,)): 0}, 50) is None


def test_a_table_compares_with_what_is_within_the_budget_alone() -> None:
    draw = random.Random(1)
    everything = Plan("everything kept", seconds=[1.0] * 3, peak=1000)
    chosen = Plan("50%", 500, CHOSEN, [1.1, 1.2, 1.15], 510, longer=0.1)
    others = [Plan(f"50%: {n}", 500, OTHER, [1.4 + draw.random()] * 3, 480) for n in range(3)]
    # One of another budget is within this one too.
    others.append(Plan("30%: lean", 300, OTHER, [1.3] * 3, 290))
    too_large = Plan("50%: large", 500, OTHER, [1.01] * 3, 600)
    # Those that were timed once count among the others, and have no line.
    others.append(Plan("50%: timed once", 500, OTHER, [1.9]))
    impossible = Plan("10%", 100, CHOSEN)
    text = "\n".join(adaptive_memory.table([everything, chosen, impossible, *others, too_large]))
    # The best of the others is the lean one, and what takes more than the budget is not compared with.
    assert "- 50%: the budget is kept to (102.0%), 0.884 (0.793 to 0.985) of the time of the best of 5 other" in text
    assert "plans. 49.0% less memory takes 1.150 of the time" in text and "timed once" not in text
    assert "| 10%, chosen | 0.0 MiB | cannot be met" in text and "| 1.150 | 1.100 | 0.884 |" in text
    chosen.peak, chosen.seconds = 600, [2.0] * 3
    text = "\n".join(adaptive_memory.table([everything, chosen, *others]))
    assert "NOT kept to" in text and "(MISSED)" in text


def test_what_is_chosen_within_megatrons_memory_is_judged_by_turns() -> None:
    full = [Plan("full", seconds=[1.0, 1.2, 1.1], peak=200 << 20), Plan("full", seconds=[2.0], peak=200 << 20)]
    chosen = [Plan("full", seconds=[0.9, 1.08, 0.99], peak=203 << 20), Plan("full", seconds=[1.6], peak=190 << 20)]
    own, ours = adaptive_memory.alone(full, chosen)
    assert own == "| `--recompute-granularity full` | 200.0 MiB | 1.100 s, 2.000 s |"
    assert ours.endswith("| 203.0 MiB, 190.0 MiB | 0.990 s, 1.600 s |")
    # The geometric mean of 0.9 three times and 1.6 / 2.0: pairs of steps, of all processes.
    said = "Chosen within that of full: the budget is kept to (101.5%), 0.874 (0.796 to 0.960) of its time."
    assert adaptive_memory.beside(full, chosen) == said
    chosen[1].seconds, chosen[1].peak = [4.0], 210 << 20
    assert adaptive_memory.beside(full, chosen).endswith(
        "NOT kept to (105.0%), 1.099 (0.582 to 2.074) of its time (MISSED)."
    )


def test_two_trainings_of_two_ranks_take_turns_by_steps(tmp_path: Path) -> None:
    order: list[tuple[int, int]] = []
    steps = [threading.Barrier(2), threading.Barrier(2)]

    def train(mine: int, rank: int) -> None:
        turn = memory_plans.Turn(tmp_path, mine)
        for number in range(3):
            turn.wait()
            order.append((number, mine))
            steps[mine].wait(60)
            if rank == 0:
                # The other rank is at its next step before.
                time.sleep(0.05)
                turn.give()

    every = [threading.Thread(target=train, args=(mine, rank)) for mine in (1, 0) for rank in (0, 1)]
    for each in every:
        each.start()
    for each in every:
        each.join(60)
    assert order == [(number, mine) for number in range(3) for mine in (0, 0, 1, 1)]


def test_losses_that_differ_in_any_process_are_told() -> None:
    assert adaptive_memory._in_common(["a", "b"], ["a", "b", "c"], ["a", "b"]) == "the first 2 steps have the same bits"
    assert adaptive_memory._in_common(["a", "b"], ["a", "b", "c"], ["a", "d"]) == "step 2 DIFFERS"


@matrix.whole
def test_a_small_model_trains_under_every_plan(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    flags = "--configuration trial --rounds 2 --others 2 --shares 0.5 --page"
    assert adaptive_memory.main([*flags.split(), str(page)]) == 0
    text = page.read_text()
    assert text.count("have the same bits") == 4 and "DIFFERS" not in text and "NOT kept" not in text
    assert "| 50%, chosen |" in text and "| the least possible, chosen |" in text


def test_a_page_renews_one_part() -> None:
    page = adaptive_memory.page_of({}, "long", ["a", "", "- b"])
    both = adaptive_memory.page_of(adaptive_memory.parts(page), "dense-medium", ["c"])
    assert adaptive_memory.parts(both) == {"dense-medium": "c", "long": "a\n\n- b"}
    assert both.index("## dense-medium") < both.index("## long") and both.startswith("# Memory by choice\n")
    assert adaptive_memory.parts(adaptive_memory.page_of(adaptive_memory.parts(both), "long", ["d"]))["long"] == "d"


def test_configurations_are_smaller_where_no_plan_changes_anything() -> None:
    for name in adaptive_memory.NAMES:
        found = adaptive_memory._configuration(name)
        assert "--vocab-size 4095" in found.flags and f"--global-batch-size {found.processes}" in found.flags
        assert "vocabulary 4,096" in found.about and "32,768" not in found.about
