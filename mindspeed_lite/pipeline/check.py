"""Validates generated and user-defined schedules.

A user's order is a function of (rank, shape) that yields steps, with optional attributes `placement` (function of the
number of ranks) and `chunks` (per rank).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from . import costs as costs_module
from . import orders
from .orders import OrderError, PipelineShape
from .simulate import DeadlockError, simulate
from .steps import BACKWARDS, Entry, Kind, OverlappedPair, Placement, Schedule, Step, steps_of

# Per micro-batch and chunk on a rank.
_IN_ORDER = ((Kind.FORWARD,), (Kind.RECOMPUTE,), BACKWARDS, (Kind.WEIGHT_GRAD,))


# Seconds to import a user's order, and for all its ranks.
PATIENCE = 20.0
T = TypeVar("T")


class ScheduleError(ValueError):
    """Holds the first problem of a schedule, in one line."""


def check(schedule: Schedule, max_live: int | None = None) -> Schedule:
    """Raises ScheduleError with the first problem; max_live: maximum chunk activations per rank."""
    for problem in problems(schedule, max_live):
        raise ScheduleError(f"{schedule.name}: {problem}")
    return schedule


def problems(schedule: Schedule, max_live: int | None = None) -> Iterator[str]:
    """Problems, one line each; the first may cause the others."""
    found = [*_problems_of_placement(schedule.placement)]
    if not found and len(schedule.ranks) != schedule.num_ranks:
        found = [f"it has entries for {len(schedule.ranks)} ranks, and its placement {schedule.num_ranks}"]
    if not found:
        for rank, entries in enumerate(schedule.ranks):
            found += [f"rank {rank}: {each}" for each in _problems_of_entries(schedule, entries)]
    if not found:
        for rank in range(schedule.num_ranks):
            found += [f"rank {rank}: {each}" for each in _problems_of_rank(schedule, rank)]
    yield from found
    if found:
        return
    try:
        simulate(schedule, costs_module.uniform(schedule.num_stages))
    except DeadlockError as error:
        yield str(error).removeprefix(f"{schedule.name}: ")
        return
    for rank in range(schedule.num_ranks):
        live = costs_module.peak_live(schedule, rank)
        if max_live is not None and live > max_live:
            yield f"rank {rank} holds {live} chunk activations at once, more than the {max_live} that are allowed"


def _problems_of_placement(placement: Placement) -> Iterator[str]:
    if not placement or not placement[0] or len({len(row) for row in placement}) != 1:
        yield "its placement has a row for each rank, and every row as many chunks"
        return
    stages = sorted(stage for row in placement for stage in row)
    if stages != list(range(len(stages))):
        yield f"its placement has the stages {stages}: it has each from 0 to {len(stages) - 1} once"


def _problems_of_entries(schedule: Schedule, entries: tuple[Entry, ...]) -> Iterator[str]:
    for place, entry in enumerate(entries):
        if not isinstance(entry, Step | OverlappedPair) or not all(
            isinstance(each.kind, Kind) for each in steps_of(entry)
        ):
            yield f"entry {place} is no step and no overlapped pair, but {entry!r}"
            continue
        for step in steps_of(entry):
            if step.chunk not in range(schedule.num_chunks):
                yield f"entry {place} ({entry}): there is no chunk {step.chunk}, only 0 to {schedule.num_chunks - 1}"
            if step.microbatch not in range(schedule.microbatches):
                yield (
                    f"entry {place} ({entry}): there is no micro-batch {step.microbatch}, only 0 to "
                    f"{schedule.microbatches - 1}"
                )
        if isinstance(entry, OverlappedPair) and entry.forward[1:] == entry.backward[1:]:
            yield f"entry {place} ({entry}): a backward cannot be overlapped with the forward that it needs"


def _problems_of_rank(schedule: Schedule, rank: int) -> Iterator[str]:
    places: dict[Step, int] = {}
    for place, entry in enumerate(schedule.ranks[rank]):
        for step in steps_of(entry):
            if step in places:
                yield f"{step} stands twice, at entries {places[step]} and {place}"
            places[step] = place
    for chunk in range(schedule.num_chunks):
        for microbatch in range(schedule.microbatches):
            yield from _problems_of_unit(schedule, places, chunk, microbatch)


def _problems_of_unit(schedule: Schedule, places: dict[Step, int], chunk: int, microbatch: int) -> Iterator[str]:
    found = {kind: places[step] for kind in Kind if (step := Step(kind, chunk, microbatch)) in places}
    unit = f"chunk {chunk}, micro-batch {microbatch}"
    if Kind.FORWARD not in found:
        yield f"{unit}: there is no forward (F)"
    backwards = [kind for kind in BACKWARDS if kind in found]
    if len(backwards) > 1:
        yield f"{unit}: there are a full backward (B) and an input gradient (BI): one of them is enough"
    elif not backwards and not schedule.is_forward_only:
        yield f"{unit}: there is no backward (B or BI)"
    if (Kind.INPUT_GRAD in found) != (Kind.WEIGHT_GRAD in found):
        missing, there = ("W", "BI") if Kind.INPUT_GRAD in found else ("BI", "W")
        yield f"{unit}: there is a {there} and no {missing}"
    in_order = [(kind, found[kind]) for kinds in _IN_ORDER for kind in kinds if kind in found]
    for (first, place), (second, later) in pairwise(in_order):
        if place >= later and len(backwards) < 2:
            yield f"{unit}: {second.value} stands at entry {later}, before the {first.value} that it needs, at {place}"


def load(name: str, shape: PipelineShape) -> Schedule:
    """Load `module:function` or `FILE.py:function` and check it. Raises ScheduleError."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise ScheduleError(f"{name}: an order of your own is module:function or FILE.py:function")
    module = _result(f"{name}: {source} cannot be imported: it", _imported, source)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ScheduleError(f"{name}: {source} has no function {attribute}")
    return _result(f"{name}: it", _schedule, name, function, shape)


def _schedule(name: str, function: Any, shape: PipelineShape) -> Schedule:
    shape = replace(shape, chunks=getattr(function, "chunks", shape.chunks))
    placement = getattr(function, "placement", None)
    # More steps imply a duplicate.
    most = len(Kind) * shape.chunks * shape.microbatches + 1

    def order(rank: int, shape: PipelineShape) -> Iterator[Entry]:
        return islice(function(rank, shape), most)

    try:
        return check(orders.from_function(name, order, shape, placement(shape.ranks) if placement else None))
    except OrderError as error:
        raise ScheduleError(f"{name}: {error}") from None


def _result(subject: str, function: Callable[..., T], *arguments: Any) -> T:
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function(*arguments))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if found:
        return found[0]
    if not failed:
        raise ScheduleError(f"{subject} has not ended within {PATIENCE:g} s")
    (error,) = failed
    if isinstance(error, ScheduleError):
        raise error
    raise ScheduleError(f"{subject} raises {type(error).__name__}: {error}") from error


def _imported(source: str) -> ModuleType:
    return _module_of_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)


def _module_of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_mindspeed_lite_order_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
