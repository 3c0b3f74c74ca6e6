"""`--balance-sequence-lengths` in real trainings: losses as without where tokens count unequally, and resumption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import matrix
from tests.harness.training import LAYOUTS, Trainer
from tests.harness.unequal_lengths import ADAM, FLAG, OTHER_ORDER, distance, run

RELEASE = "0.19.2"


def test_losses_are_those_without(trainer: Callable[[str], Trainer], tmp_path: Path) -> None:
    its = trainer(RELEASE)
    off, on = run(its, 2, tmp_path, ""), run(its, 2, tmp_path, FLAG)
    assert distance(off, on) <= OTHER_ORDER
    # That bound tells weights of tokens apart, and samples do move here.
    assert distance(off, run(its, 2, tmp_path, FLAG, before="single_samples")) > 10 * OTHER_ORDER


def test_a_resumed_run_is_the_run(trainer: Callable[[str], Trainer], tmp_path: Path) -> None:
    its, given = trainer(RELEASE), (tmp_path, f"{FLAG} {ADAM}")
    saved = tmp_path / "saved"
    whole = run(its, 2, *given, "--save", str(saved), "--save-interval", "1")
    (saved / "latest_checkpointed_iteration.txt").write_text("1")
    assert run(its, 2, *given, "--load", str(saved)) == whole[1:]


@matrix.whole
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "--calculate-per-token-loss"),
        (
            2,
            f"--micro-batch-size 1 {ADAM} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        ),
        (2, LAYOUTS["ep2"][1]),
        (4, "--pipeline-model-parallel-size 2"),
        (4, "--tensor-model-parallel-size 2"),
        (4, "--context-parallel-size 2 --position-embedding-type none"),
    ],
)
def test_so_they_are_in_every_layout(
    trainer: Callable[[str], Trainer], ranks: int, layout: str, tmp_path: Path
) -> None:
    off, on = (run(trainer(RELEASE), ranks, tmp_path, layout, *flag) for flag in ([], [FLAG]))
    assert distance(off, on) <= OTHER_ORDER
