"""Reads recorded executions and compares them with a schedule.

JSON lines: rank, kind (a `Kind`), chunk, microbatch, begin and end in seconds of one clock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from mindspeed_lite import json_file

from .costs import Costs
from .steps import Entry, Kind, Schedule, Step, steps_of


class TraceError(ValueError):
    """Trace of another schedule."""


@dataclass(frozen=True)
class ExecutedStep:
    """Executed step; times in seconds."""

    rank: int
    step: Step
    begin: float
    end: float


def read(path: str | Path) -> list[ExecutedStep]:
    """Read a file, or each pipeline rank's first `*.jsonl` in a folder. Raises JsonFileError."""
    if not Path(path).is_dir():
        return _read_file(path)
    found: dict[int, list[ExecutedStep]] = {}
    for file in sorted(Path(path).glob("*.jsonl")):
        records = _read_file(file)
        found.setdefault(records[0].rank, records)
    if not found:
        raise json_file.JsonFileError(f"{path}: there is no *.jsonl in this folder")
    return [record for rank in sorted(found) for record in found[rank]]


def _read_file(path: str | Path) -> list[ExecutedStep]:
    found = [json_file.decode(text, place, _RECORD) for place, text in json_file.lines(path)]
    if not found:
        raise json_file.JsonFileError(f"{path}: there are no records in it")
    return found


def _made_record(rank: int, kind: str, chunk: int, microbatch: int, begin: float, end: float) -> ExecutedStep:
    if end < begin:
        raise ValueError(f"it ends at {end:g}, before it begins at {begin:g}")
    return ExecutedStep(rank, Step(Kind(kind), chunk, microbatch), begin, end)


_SECONDS = json_file.number("seconds", -1e12, 1e12)
_RECORD = json_file.fields(
    {
        "rank": json_file.whole("a rank"),
        "kind": json_file.one_of(*(each.value for each in Kind)),
        "chunk": json_file.whole("a chunk"),
        "microbatch": json_file.whole("a micro-batch"),
        "begin": _SECONDS,
        "end": _SECONDS,
    },
    make=_made_record,
)


def training_steps(records: Iterable[ExecutedStep], schedule: Schedule) -> list[list[ExecutedStep]]:
    """Group records by training step. Raises TraceError if they do not match the schedule."""
    ranks: list[list[ExecutedStep]] = [[] for _ in range(schedule.num_ranks)]
    for record in records:
        if record.rank not in range(schedule.num_ranks):
            raise TraceError(f"the trace has rank {record.rank}, and the schedule {schedule.num_ranks} ranks")
        ranks[record.rank].append(record)
    planned = [list(schedule.steps(rank)) for rank in range(schedule.num_ranks)]
    rounds = min(len(run) // len(plan) for run, plan in zip(ranks, planned, strict=True) if plan)
    for rank, (run, plan) in enumerate(zip(ranks, planned, strict=True)):
        for place, record in enumerate(run[: rounds * len(plan)]):
            wanted = plan[place % len(plan)]
            if record.step != wanted:
                raise TraceError(
                    f"rank {rank} ran {record.step} as step {place % len(plan)} where {schedule.name} has {wanted}"
                )
    if rounds == 0:
        short = next(rank for rank, (run, plan) in enumerate(zip(ranks, planned, strict=True)) if len(run) < len(plan))
        raise TraceError(
            f"the trace holds no whole training step: {len(ranks[short])} of rank {short}'s {len(planned[short])} steps"
        )
    return [
        [
            record
            for run, plan in zip(ranks, planned, strict=True)
            for record in run[n * len(plan) : (n + 1) * len(plan)]
        ]
        for n in range(rounds)
    ]


def makespan(records: Sequence[ExecutedStep]) -> float:
    return max(each.end for each in records) - min(each.begin for each in records)


def bubble(records: Sequence[ExecutedStep]) -> float:
    ranks = {each.rank for each in records}
    covered = sum(_covered([each for each in records if each.rank == rank]) for rank in ranks)
    return 1 - covered / (makespan(records) * len(ranks))


def _covered(records: Sequence[ExecutedStep]) -> float:
    total, until = 0.0, float("-inf")
    for each in sorted(records, key=lambda record: record.begin):
        total += max(0.0, each.end - max(each.begin, until))
        until = max(until, each.end)
    return total


def as_executed(schedule: Schedule, records: Iterable[ExecutedStep]) -> Schedule:
    """The schedule with pairs in sequence, unless recorded as overlapped."""
    run = {(each.rank, each.step): each for each in records}
    for rank, entries in enumerate(schedule.ranks):
        for entry in entries:
            ahead, *back = (run[rank, step] for step in steps_of(entry))
            if back and back[0].begin < ahead.end:
                return schedule
    return schedule.one_by_one()


class Overheads(NamedTuple):
    """Seconds of a message, and after each kind of step."""

    message: float
    between: Mapping[Kind, float]


def overheads(training: Iterable[Sequence[ExecutedStep]], schedule: Schedule) -> Overheads:
    """Means over recorded training steps.

    Message: from the end of the sender's step to the begin of a receiver's step that waited for it. After a step: the
        gap to the next one if that waited neither for its input nor for the receivers of the last two messages.
    """
    messages: list[float] = []
    after: dict[Kind, list[float]] = {}
    for records in training:
        run = {(each.rank, each.step): each for each in records}
        ready = _receivers_ready(run, schedule)
        for rank in range(schedule.num_ranks):
            sending = deque([-math.inf], maxlen=2)
            for last, following in pairwise(schedule.steps(rank)):
                before, now = run[rank, last], run[rank, following]
                if (rank, last) in ready:
                    sending.append(ready[rank, last])
                source = schedule.input_source(rank, following)
                sent = run[source].end if source is not None and source[0] != rank else before.begin
                if sent > before.end:
                    messages.append(now.begin - sent)
                elif sent <= before.begin and max(sending) <= before.end:
                    after.setdefault(last.kind, []).append(max(0.0, now.begin - before.end))
    # Clock skew may give a negative time.
    message = max(0.0, statistics.fmean(messages)) if messages else 0.0
    return Overheads(message, {kind: statistics.fmean(gaps) for kind, gaps in after.items()})


def _receivers_ready(run: Mapping[tuple[int, Step], ExecutedStep], schedule: Schedule) -> dict[tuple[int, Step], float]:
    found: dict[tuple[int, Step], float] = {}
    for rank in range(schedule.num_ranks):
        for before, step in pairwise([None, *schedule.steps(rank)]):
            source = None if step is None else schedule.input_source(rank, step)
            if source is not None and source[0] != rank:
                found[source] = -math.inf if before is None else run[rank, before].begin
    return found


@dataclass(frozen=True)
class RecordedCosts(Costs):
    recorded: Mapping[tuple[int, Step], ExecutedStep] = field(default_factory=dict)

    def seconds(self, schedule: Schedule, rank: int, entry: Entry) -> float:
        return _covered([self.recorded[rank, step] for step in steps_of(entry)])


def recorded_costs(records: Iterable[ExecutedStep], besides: Overheads | None = None) -> RecordedCosts:
    recorded = {(each.rank, each.step): each for each in records}
    return RecordedCosts([], [], [], **(besides or Overheads(0.0, {}))._asdict(), recorded=recorded)


def median_seconds(records: Iterable[ExecutedStep], schedule: Schedule) -> dict[tuple[Kind, int], float]:
    """Median seconds by (kind, stage), for `costs.from_measured`."""
    found: dict[tuple[Kind, int], list[float]] = {}
    for each in records:
        stage = schedule.stage(each.rank, each.step.chunk)
        found.setdefault((each.step.kind, stage), []).append(each.end - each.begin)
    return {key: sorted(values)[len(values) // 2] for key, values in found.items()}
