"""The benchmark of chosen memory plans: turns, tables and the page."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from benchmarks import adaptive_memory, memory_plans
from benchmarks.memory_plans import Plan
from tests.harness import matrix


def test_a_table_marks_budgets_that_are_missed_or_cannot_be_met() -> None:
    everything = Plan("everything kept", seconds=[1.0] * 3, peak=1000 << 20)
    chosen = Plan("50%", 500 << 20, [1.1, 1.2, 1.15], 510 << 20, longer=0.1)
    impossible = Plan("10%", 100 << 20)
    text = "\n".join(adaptive_memory.table([everything, chosen, impossible]))
    assert "| 50% (500.0 MiB) | 510.0 MiB | 49.0% | 1.150 s | 1.150 | 1.100 |" in text
    assert "| 10% (100.0 MiB) | cannot be met |" in text
    chosen.peak = 600 << 20
    assert "600.0 MiB (MISSED)" in "\n".join(adaptive_memory.table([everything, chosen]))


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
    flags = "--configuration trial --rounds 2 --shares 0.5 --page"
    assert adaptive_memory.main([*flags.split(), str(page)]) == 0
    text = page.read_text()
    assert text.count("have the same bits") == 4 and "DIFFERS" not in text and "NOT kept" not in text
    assert "| 50% (" in text and "| the least possible |" in text


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
