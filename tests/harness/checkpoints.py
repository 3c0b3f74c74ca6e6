"""Checkpoints in trainings of Megatron's script: who writes, who reads, and the losses that follow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.training import NO_DROPOUT, Result, Trainer

STEPS, SAVED = 6, 3
WAYS = ("on-off", "off-on")


@dataclass(frozen=True)
class Checkpoint:
    """Six steps of which the third is saved, and the last three again by who reads it: `on-off`, writer and reader."""

    given: str
    on: str
    ranks: int = 2
    ways: tuple[str, ...] = WAYS
    quick: tuple[str, ...] = ()
    # Of the reader, if another layout; its losses are those of the writer, or of a checkpoint without the feature.
    reader: tuple[int, str] | None = None
    same_model: bool = True
    near: float = 0.0
    before: str = ""


def goes_on(
    its: Trainer,
    row: Checkpoint,
    way: str,
    written: dict[str, tuple[Path, Result]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Train, save and load one way, and compare losses."""
    job = {"before": row.before} if row.before else {}

    def flags(arm: str) -> list[str]:
        return [*NO_DROPOUT, *row.given.split(), *(row.on.split() if arm == "on" else ())]

    def write(arm: str) -> tuple[Path, Result]:
        key = " ".join([*flags(arm), row.before])
        if key not in written:
            folder = tmp_path_factory.mktemp("saved")
            saving = ["--save", str(folder), "--save-interval", str(SAVED)]
            result = its.script(row.ranks, [*flags(arm), *saving], STEPS, **job).check()
            # Not every format looks at --ckpt-step.
            (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
            written[key] = folder, result
        return written[key]

    def read(arm: str, folder: Path) -> list[float]:
        ranks, more = row.reader or (row.ranks, "")
        result = its.script_once(ranks, [*flags(arm), *more.split(), "--load", str(folder)], STEPS, **job)
        assert "successfully loaded checkpoint" in result.log()
        return result.losses()

    writer, _, reader = way.partition("-")
    folder, result = write(writer)
    found = read(reader, folder)
    expected = result.losses()[SAVED:] if row.same_model else read("off", write("off")[0])
    assert len(found) == len(expected) == STEPS - SAVED and result.losses()[0] > found[0]
    for a, b in zip(expected, found, strict=True):
        assert abs(a - b) <= row.near * abs(a)
