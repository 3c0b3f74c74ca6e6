"""Validates generated and user-defined schedules.

A user's order is a function of (rank, shape) that yields steps, with optional attributes `placement` (function of the
number of ranks) and `chunks` (per rank).
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from typing import Any, TypeVar

from . import costs, orders
from .orders import PipelineShape
from .simulate import DeadlockError, simulate
from .steps import Entry, Kind, OverlappedPair, Schedule, Step, steps_of

# Of a micro-batch and chunk on a rank, in order.
_STEPS_OF_UNIT = ("F B", "F BI W", "F R B", "F R BI W")
T = TypeVar("T")


class ScheduleError(ValueError):
    """Raised for an invalid schedule; the message is its first problem, in one line."""


def check(schedule: Schedule) -> Schedule:
    """Raises ScheduleError with the first problem."""
    problem = next(_problems(schedule), None)
    if problem is not None:
        raise ScheduleError(f"{schedule.name}: {problem}")
    return schedule


def _problems(schedule: Schedule) -> Iterator[str]:
    """Problems of a schedule; the first may cause the others."""
    placement = schedule.placement
    if not placement or not placement[0] or len({len(row) for row in placement}) != 1:
        yield "its placement has a row for each rank, and every row as many chunks"
    stages = sorted(stage for row in placement for stage in row)
    if stages != list(range(len(stages))):
        yield f"its placement has the stages {stages}: it has each from 0 to {len(stages) - 1} once"
    if len(schedule.ranks) != schedule.num_ranks:
        yield f"it has entries for {len(schedule.ranks)} ranks, and its placement {schedule.num_ranks}"
    for problems in (_problems_of_entries, _problems_of_units):
        for rank, entries in enumerate(schedule.ranks):
            yield from (f"rank {rank}: {each}" for each in problems(schedule, entries))
    try:
        simulate(schedule, costs.uniform(schedule.num_stages))
    except DeadlockError as error:
        yield str(error).removeprefix(f"{schedule.name}: ")


def _problems_of_entries(schedule: Schedule, entries: tuple[Entry, ...]) -> Iterator[str]:
    places: dict[Step, int] = {}
    for place, entry in enumerate(entries):
        if not isinstance(entry, Step | OverlappedPair) or not all(
            isinstance(each.kind, Kind) for each in steps_of(entry)
        ):
            yield f"entry {place} is no step and no overlapped pair, but {entry!r}"
        for step in steps_of(entry):
            for name, value, count in (
                ("chunk", step.chunk, schedule.num_chunks),
                ("micro-batch", step.microbatch, schedule.microbatches),
            ):
                if value not in range(count):
                    yield f"entry {place} ({entry}): there is no {name} {value}, only 0 to {count - 1}"
            if step in places:
                yield f"{step} stands twice, at entries {places[step]} and {place}"
            places[step] = place
        if isinstance(entry, OverlappedPair) and entry.forward[1:] == entry.backward[1:]:
            yield f"entry {place} ({entry}): a backward cannot be overlapped with the forward that it needs"


def _problems_of_units(schedule: Schedule, entries: tuple[Entry, ...]) -> Iterator[str]:
    found: dict[tuple[int, int], list[str]] = {}
    for step in (step for entry in entries for step in steps_of(entry)):
        found.setdefault((step.chunk, step.microbatch), []).append(step.kind.value)
    for unit in product(range(schedule.num_chunks), range(schedule.microbatches)):
        steps = " ".join(found.get(unit, ()))
        if steps not in (("F",) if schedule.is_forward_only else _STEPS_OF_UNIT):
            yield (
                f"chunk {unit[0]}, micro-batch {unit[1]}: its steps are {steps or 'none'}: want F B or F BI W, and R "
                "before the B or BI of what is recomputed"
            )


def load(name: str, shape: PipelineShape) -> Schedule:
    """Load `module:function` or `FILE.py:function` and check it. Raises ScheduleError."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise ScheduleError(f"{name}: an order of your own is module:function or FILE.py:function")
    module = _result(f"{name}: {source} cannot be imported: it", lambda: _imported(source))
    function = module.get(attribute)
    if not callable(function):
        raise ScheduleError(f"{name}: {source} has no function {attribute}")
    return check(_result(f"{name}: it", lambda: _schedule(name, function, shape)))


def _schedule(name: str, function: Any, shape: PipelineShape) -> Schedule:
    shape = replace(shape, chunks=getattr(function, "chunks", shape.chunks))
    placement = getattr(function, "placement", None)
    # More steps imply a duplicate.
    most = len(Kind) * shape.chunks * shape.microbatches + 1

    def order(rank: int, shape: PipelineShape) -> Iterator[Entry]:
        return islice(function(rank, shape), most)

    return orders.from_function(name, order, shape, placement(shape.ranks) if placement else None)


def _result(subject: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ScheduleError(f"{subject} raises {type(error).__name__}: {error}") from error


def _imported(source: str) -> Mapping[str, Any]:
    return runpy.run_path(source) if source.endswith(".py") else vars(importlib.import_module(source))
