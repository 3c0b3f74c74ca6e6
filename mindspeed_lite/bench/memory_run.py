"""Runs a command for two steps and compares its memory with the prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_lite.bench import harness
from mindspeed_lite.bench.harness import Arm, Job, Process
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
class Measured:
    """Byte counts of one process.

    Attributes:
        bytes: by category; `host`: moments in host memory.
        peak: of process or device allocator, by `peak_kind`.
        kept: activations at their peak, by place in the code.
    """

    rank: int
    parameters: int
    bytes: Mapping[str, int]
    peak: int
    peak_kind: str
    kept: Sequence[Mapping[str, Any]]


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


@dataclass(frozen=True)
class Run:
    processes: Sequence[Measured]
    world_size: int
    device: str


def run(
    command: Sequence[str], folder: Path, timeout: float, progress: Callable[[int], None] = lambda steps: None
) -> Run:
    job = Job(tuple(command), folder, warmup=0, steps=2, timeout=timeout, memory=True)
    outcome = harness.run(job, Arm("memory", "given"), 1, progress=progress)
    log = f"(log: {folder / outcome.log})"
    if outcome.status != "ok" or outcome.run is None:
        raise MeasureError(f"{outcome.reason} {log}", outcome.log_tail)
    for process in outcome.processes:
        if process.end is None or not process.end["memory"]:
            raise MeasureError(f"rank {process.rank} counted nothing {log}")
    environment = outcome.run["environment"]
    found = [measured(process) for process in outcome.processes]
    return Run(found, int(environment["world_size"]), str(environment["device_type"]))


def measured(process: Process) -> Measured:
    assert process.end is not None and process.run is not None
    taken = dict(process.end["memory"])
    kept, parameters = taken.pop("kept"), taken.pop("parameters")
    peak = max(step["peak_memory_bytes"] for step in process.steps)
    return Measured(process.rank, parameters, taken, peak, process.run["memory_kind"], kept)


def compare(predicted: Sequence[Rank], processes: Sequence[Measured]) -> list[Comparison]:
    found = []
    for process in processes:
        rank = next(each for each in predicted if each.ranks[0] <= process.rank <= each.ranks[1])
        expected = {**rank.categories, "host": rank.states.host}
        for category, size in expected.items():
            counted = process.bytes[category]
            if category != "host" or size or counted:
                found.append(Comparison(process.rank, rank.stage, category, size, counted))
    return found
