"""Trainings in which sequences have unequal numbers of tokens, for `--balance-sequence-lengths`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness import document_data
from tests.harness.training import MODEL, NO_DROPOUT, SCRIPT, Trainer

FLAG = "--balance-sequence-lengths"
STEPS = 3
# fp32 sums in another order move losses by a few roundings (2^-24). Where tokens had other weights, they are off by
# more than ten times as much from the second step on.
OTHER_ORDER = 3e-7
ADAM = "--optimizer adam --lr 1e-3"  # Megatron checkpoints no other optimizer.
FP32 = [each for each in MODEL if each not in ("--bf16", "--mock-data")]


def run(
    trainer: Trainer,
    ranks: int,
    tmp_path: Path,
    arguments: str,
    *more: str,
    layers: str = "--use-flash-attn",
    **job: Any,
) -> list[float]:
    """Losses of a training in fp32 with documents apart, whose ends do not count: samples have unequal tokens."""
    data = tmp_path / "data"
    if not data.with_suffix(".idx").exists():
        document_data.write(data, 1200, document_data.GeneratedLengths(4, 1.2, 64, 1))
    files = ["--data-path", str(data), "--data-cache-path", str(tmp_path / "cache")]
    packed = ["--dataloader-inter-document-masking", "--eod-mask-loss", *layers.split(), "--mindspeed-lite-strict"]
    argv = [SCRIPT, *FP32, *files, *packed, *NO_DROPOUT, "--global-batch-size", "16", "--train-iters", str(STEPS)]
    # What is logged is a mean over tokens however they are weighted; steps along the gradient itself show the weights.
    argv += ["--optimizer", "sgd", "--lr", "0.5", *arguments.split(), *more]
    return trainer.run(entry="script", arm="adaptor", nproc=ranks, argv=argv, **job).check().losses()


def distance(found: list[float], other: list[float]) -> float:
    assert len(found) == len(other) == STEPS
    return max(abs(a - b) / a for a, b in zip(found, other, strict=True))
