"""`--balance-sequence-lengths` in real trainings: losses as without where tokens count unequally, and resumption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_lite.parallel.balance import lengths
from mindspeed_lite.parallel.balance.lengths import GeneratedLengths
from tests.harness import document_data, matrix
from tests.harness.script_trainings import LAYOUTS, MODEL, NO_DROPOUT, SCRIPT, lm_losses
from tests.harness.training import Trainer

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
        document_data.write(data, 1200, GeneratedLengths(4, 1.2, 64, 1))
    files = ["--data-path", str(data), "--data-cache-path", str(tmp_path / "cache")]
    packed = ["--dataloader-inter-document-masking", "--eod-mask-loss", "--use-flash-attn", "--mindspeed-lite-strict"]
    argv = [SCRIPT, *FP32, *files, *packed, *NO_DROPOUT, "--global-batch-size", "16", "--train-iters", str(STEPS)]
    # What is logged is a mean over tokens however they are weighted; steps along the gradient itself show the weights.
    argv += ["--optimizer", "sgd", "--lr", "0.5", *arguments.split(), *more]
    return lm_losses(trainer.run(entry="script", arm="adaptor", nproc=ranks, argv=argv, **job).check())


def distance(found: list[float], other: list[float]) -> float:
    assert len(found) == len(other) == STEPS
    return max(abs(a - b) / a for a, b in zip(found, other, strict=True))


def move_single_samples() -> None:
    """A fault: micro-batches are taken apart."""
    init = lengths.StepOrder.__init__

    def __init__(self: Any, first: int, total: int, step: int, micro_batch: int, *rest: Any, **more: Any) -> None:
        init(self, first, total, step, 1, *rest, **more)

    lengths.StepOrder.__init__ = __init__  # type: ignore[method-assign]


def test_losses_are_those_without(trainer: Callable[[str], Trainer], tmp_path: Path) -> None:
    its = trainer(RELEASE)
    off, on = run(its, 2, tmp_path, ""), run(its, 2, tmp_path, FLAG)
    assert distance(off, on) <= OTHER_ORDER
    # That bound tells weights of tokens apart, and samples do move here.
    fault = f"{__name__}:{move_single_samples.__name__}"
    assert distance(off, run(its, 2, tmp_path, FLAG, before=fault)) > 10 * OTHER_ORDER


def test_a_resumed_run_is_the_run(trainer: Callable[[str], Trainer], tmp_path: Path) -> None:
    its, given = trainer(RELEASE), (tmp_path, f"{FLAG} {ADAM}")
    saved = str(tmp_path / "saved")
    first = run(its, 2, *given, "--save", saved, "--save-interval", "1", "--exit-interval", "1")
    assert [*first, *run(its, 2, *given, "--load", saved)] == run(its, 2, *given)


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
