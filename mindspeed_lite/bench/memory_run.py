"""Runs a command for two steps and compares its memory with the prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_lite.bench import harness
from mindspeed_lite.bench.harness import Arm, Job, Outcome, Process
from mindspeed_lite.planner import Rank

# Allowed relative deviation of predictions of at least JUDGED bytes.
TOLERANCE = 0.05
JUDGED = 1_000_000


class MeasureError(Exception):
    """The command ended without a count; one line."""

    def __init__(self, message: str, log_tail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.log_tail = list(log_tail)


@dataclass(frozen=True)
class Comparison:
    rank: int
    stage: int
    category: str
    predicted: int
    measured: int

    @property
    def deviation(self) -> float:
        if not self.measured:
            return 0.0 if not self.predicted else float("inf")
        return self.predicted / self.measured - 1

    @property
    def is_off(self) -> bool:
        return max(self.predicted, self.measured) >= JUDGED and abs(self.deviation) > TOLERANCE


def run(
    command: Sequence[str], folder: Path, timeout: float, progress: Callable[[int], None] = lambda steps: None
) -> Outcome:
    """The finished run, in which every process has counted."""
    job = Job(tuple(command), folder, warmup=0, steps=2, timeout=timeout, memory=True)
    outcome = harness.run(job, Arm("memory", "given"), 1, progress=progress)
    log = f"(log: {folder / outcome.log})"
    if outcome.status != "ok" or outcome.run is None:
        raise MeasureError(f"{outcome.reason} {log}", outcome.log_tail)
    for process in outcome.processes:
        if not process.memory:
            raise MeasureError(f"rank {process.rank} counted nothing {log}")
    return outcome


def compare(predicted: Sequence[Rank], processes: Sequence[Process]) -> list[Comparison]:
    found = []
    for process in processes:
        rank = next(each for each in predicted if each.ranks[0] <= process.rank <= each.ranks[1])
        expected = {**rank.categories, "host": rank.states.host}
        for category, size in expected.items():
            counted = process.memory[category]
            if category != "host" or size or counted:
                found.append(Comparison(process.rank, rank.stage, category, size, counted))
    return found
