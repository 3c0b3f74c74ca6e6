"""Reads recorded executions and compares them with a schedule.

JSON lines: rank, kind (a `Kind`), chunk, microbatch, begin and end in seconds of one clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from mindspeed_lite import json_file

from .costs import Costs
from .simulate import Simulation, TimedEntry
from .steps import Entry, Kind, OverlappedPair, Schedule, Step, steps_of


class TraceError(ValueError):
    """Trace of another schedule."""


class ExecutedStep(NamedTuple):
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


def training_steps(records: Iterable[ExecutedStep], schedule: Schedule) -> list[Simulation]:
    """Times of each recorded training step; pairs in sequence, unless recorded as overlapped. Raises TraceError."""
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
        if rounds == 0 and len(run) < len(plan):
            raise TraceError(f"the trace holds no whole training step: {len(run)} of rank {rank}'s {len(plan)} steps")
    return [
        _execution(
            schedule, [run[n * len(plan) : (n + 1) * len(plan)] for run, plan in zip(ranks, planned, strict=True)]
        )
        for n in range(rounds)
    ]


def _execution(schedule: Schedule, ranks: Sequence[Sequence[ExecutedStep]]) -> Simulation:
    start = min(each.begin for run in ranks for each in run)
    times = [{each.step: (each.begin - start, each.end - start) for each in run} for run in ranks]

    def overlaps(rank: int, entry: Entry) -> bool:
        return isinstance(entry, OverlappedPair) and times[rank][entry.backward][0] < times[rank][entry.forward][1]

    if not any(overlaps(rank, entry) for rank, entries in enumerate(schedule.ranks) for entry in entries):
        schedule = schedule.one_by_one()
    return Simulation(
        schedule,
        tuple(
            tuple(
                TimedEntry(entry, times[rank][steps_of(entry)[0]][0], times[rank][steps_of(entry)[-1]][1])
                for entry in entries
            )
            for rank, entries in enumerate(schedule.ranks)
        ),
    )


def median_costs(executions: Sequence[Simulation]) -> Costs:
    """Median seconds by kind and stage, and mean seconds of a message; full backwards split in half."""
    found: dict[tuple[Kind, int], list[float]] = {}
    for execution in executions:
        for rank, entries in enumerate(execution.ranks):
            for timed in entries:
                for step in steps_of(timed.entry):
                    stage = execution.schedule.stage(rank, step.chunk)
                    found.setdefault((step.kind, stage), []).append(timed.end - timed.begin)

    def of(kind: Kind) -> list[float]:
        stages = range(executions[0].schedule.num_stages)
        return [statistics.median_high(found.get((kind, stage), [0.0])) for stage in stages]

    half = [each / 2 for each in of(Kind.BACKWARD)]
    return Costs(
        forward=of(Kind.FORWARD),
        input_grad=[a or b for a, b in zip(of(Kind.INPUT_GRAD), half, strict=True)],
        weight_grad=[a or b for a, b in zip(of(Kind.WEIGHT_GRAD), half, strict=True)],
        recompute=of(Kind.RECOMPUTE),
        message=_message_seconds(executions),
    )


def _message_seconds(executions: Iterable[Simulation]) -> float:
    """Mean time from the end of a send to the start of the step that waited for it."""
    waits: list[float] = []
    for execution in executions:
        schedule = execution.schedule
        ended = {
            (rank, step): timed.end
            for rank, entries in enumerate(execution.ranks)
            for timed in entries
            for step in steps_of(timed.entry)
        }
        for rank, entries in enumerate(execution.ranks):
            for last, timed in pairwise(entries):
                inputs = [schedule.input(rank, step) for step in steps_of(timed.entry)]
                sent = [ended[each.source, each.step] for each in inputs if each is not None and not each.is_local]
                if max(sent, default=last.end) > last.end:
                    waits.append(timed.begin - max(sent))
    # Clock skew may give a negative time.
    return max(0.0, statistics.fmean(waits)) if waits else 0.0
