"""`--balance-sequence-lengths` in real trainings: losses as without where tokens count unequally, and resumption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import document_data, matrix
from tests.harness.training import LAYOUTS, MODEL, NO_DROPOUT, SCRIPT, Trainer

RELEASE = "0.19.2"
FLAG = "--balance-sequence-lengths"
STEPS = 3
# fp32 sums in another order move losses by a few roundings (2^-24). Where tokens had other weights, they are off by
# more than ten times as much from the second step on.
OTHER_ORDER = 3e-7
ADAM = "--optimizer adam --lr 1e-3"  # Megatron checkpoints no other optimizer.
FP32 = [each for each in MODEL if each not in ("--bf16", "--mock-data")]


def run(trainer: Trainer, ranks: int, tmp_path: Path, arguments: str, *more: str, **job: Any) -> list[float]:
    """Losses of a training in fp32 with documents apart, whose ends do not count: samples have unequal tokens."""
    data = tmp_path / "data"
    if not data.with_suffix(".idx").exists():
        document_data.write(data, 1200, document_data.GeneratedLengths(4, 1.2, 64, 1))
    files = ["--data-path", str(data), "--data-cache-path", str(tmp_path / "cache")]
    packed = ["--dataloader-inter-document-masking", "--eod-mask-loss", "--use-flash-attn", "--mindspeed-lite-strict"]
    argv = [SCRIPT, *FP32, *files, *packed, *NO_DROPOUT, "--global-batch-size", "16", "--train-iters", str(STEPS)]
    # What is logged is a mean over tokens however they are weighted; steps along the gradient itself show the weights.
    argv += ["--optimizer", "sgd", "--lr", "0.5", *arguments.split(), *more]
    return trainer.run(entry="script", arm="adaptor", nproc=ranks, argv=argv, **job).check().losses()


def distance(found: list[float], other: list[float]) -> float:
    assert len(found) == len(other) == STEPS
    return max(abs(a - b) / a for a, b in zip(found, other, strict=True))


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
