"""Adds recomputation steps to an order (MindSpeed's ripipe).

Recomputation needs only its forward's input, so it overlaps with the gradient's message or fills a bubble.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from .costs import Costs, held
from .orders import OrderError
from .simulate import simulate
from .steps import BACKWARDS, Entry, Kind, Schedule, Step, recompute, steps_of

Unit = tuple[int, int]


def in_advance(schedule: Schedule) -> Schedule:
    """Recompute before each backward: `--recompute-in-advance`.

    For full recomputation. Not on the last stage, whose gradient needs no message.
    """
    last = schedule.num_stages - 1

    def is_recomputed(rank: int, step: Step) -> bool:
        return schedule.stage(rank, step.chunk) != last

    return _with_recomputes(schedule, f"{schedule.name}+recompute-in-advance", is_recomputed)


def in_bubble(schedule: Schedule, max_live: int | None = None, costs: Costs | None = None) -> Schedule:
    """Fewest recomputations that keep every rank within a bound: `--recompute-in-bubble`.

    max_live: chunk activations per rank; default ranks times chunks.
    costs: if given, recomputations move earlier where that shortens the step.
    """
    bound = schedule.num_ranks * schedule.num_chunks if max_live is None else max_live
    if schedule.has_weight_grads:
        raise OrderError(f"{schedule.name}: no recomputation in the bubble beside weight gradients of their own")
    marked = [frozenset(to_recompute(schedule, rank, bound)) for rank in range(schedule.num_ranks)]

    def is_recomputed(rank: int, step: Step) -> bool:
        return (step.chunk, step.microbatch) in marked[rank]

    name = f"{schedule.name}+recompute-in-bubble"
    before_backward = _with_recomputes(schedule, name, is_recomputed)
    if costs is None:
        return before_backward
    in_gaps = replace(schedule, name=name, ranks=_in_gaps(schedule, marked, bound, costs))
    return min(before_backward, in_gaps, key=lambda each: simulate(each, costs).makespan)


def to_recompute(schedule: Schedule, rank: int, max_live: int) -> list[Unit]:
    """(chunk, micro-batch) units, so that a rank never holds more than `max_live`.

    Recomputing the unit with the latest backward gives the fewest.
    """
    steps = list(schedule.steps(rank))
    ends = {(step.chunk, step.microbatch): place for place, step in enumerate(steps) if step.kind in BACKWARDS}
    stored: set[Unit] = set()
    marked: list[Unit] = []
    for step in steps:
        unit = (step.chunk, step.microbatch)
        if step.kind is Kind.FORWARD:
            stored.add(unit)
        elif step.kind in BACKWARDS and unit not in stored:
            # A recomputed unit is held again during its backward.
            _mark_down_to(max_live - 1, stored, marked, ends)
        elif step.kind in BACKWARDS:
            stored.remove(unit)
        _mark_down_to(max_live, stored, marked, ends)
    return marked


def _mark_down_to(bound: int, stored: set[Unit], marked: list[Unit], ends: dict[Unit, int]) -> None:
    while len(stored) > max(bound, 0):
        latest = max(stored, key=ends.__getitem__)
        stored.remove(latest)
        marked.append(latest)


def _with_recomputes(schedule: Schedule, name: str, is_recomputed: Callable[[int, Step], bool]) -> Schedule:
    def entries(rank: int) -> Iterator[Entry]:
        for entry in schedule.ranks[rank]:
            for step in steps_of(entry):
                if step.kind in BACKWARDS and is_recomputed(rank, step):
                    yield recompute(step.chunk, step.microbatch)
            yield entry

    return replace(schedule, name=name, ranks=tuple(tuple(entries(rank)) for rank in range(schedule.num_ranks)))


def _in_gaps(
    schedule: Schedule, marked: Sequence[Collection[Unit]], bound: int, costs: Costs
) -> tuple[tuple[Entry, ...], ...]:
    """Each recomputation goes into the latest gap that fits."""
    simulation = simulate(schedule, costs)
    ranks = []
    for rank, units in enumerate(marked):
        timed = simulation.ranks[rank]
        gaps = [each.begin - before for each, before in zip(timed, [0.0, *(t.end for t in timed)], strict=False)]
        places = {step: place for place, entry in enumerate(schedule.ranks[rank]) for step in steps_of(entry)}
        begins = {unit: places[Step(Kind.FORWARD, *unit)] for unit in units}
        ends = {unit: next(places[s] for k in BACKWARDS if (s := Step(k, *unit)) in places) for unit in units}
        live = [each.live for each in held(schedule, rank)]
        for unit in units:
            for place in range(begins[unit], ends[unit]):
                live[place] -= 1
        inserted: dict[int, list[Step]] = {}
        for unit in sorted(units, key=ends.__getitem__, reverse=True):
            step, place = recompute(*unit), ends[unit]
            seconds = (costs.recompute or costs.forward)[schedule.stage(rank, unit[0])]
            while gaps[place] < seconds and place - 1 > begins[unit] and live[place - 1] < bound:
                place -= 1
            place = place if gaps[place] >= seconds else ends[unit]
            gaps[place] -= seconds
            for between in range(place, ends[unit]):
                live[between] += 1
            inserted.setdefault(place, []).insert(0, step)
        entries = [[*inserted.get(place, []), entry] for place, entry in enumerate(schedule.ranks[rank])]
        ranks.append(tuple(entry for group in entries for entry in group))
    return tuple(ranks)
