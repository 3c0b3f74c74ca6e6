"""Adds recomputation steps to an order (MindSpeed's ripipe).

Recomputation needs only its forward's input, so it overlaps with the gradient's message or fills a bubble.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import costs
from .orders import OrderError
from .simulate import TimedEntry, simulate
from .steps import BACKWARDS, Entry, Kind, Schedule, recompute, steps_of

# (chunk, micro-batch) -> index of an entry.
Places = Mapping[tuple[int, int], int]


def in_advance(schedule: Schedule) -> Schedule:
    """Recompute before each backward: `--recompute-in-advance`.

    For full recomputation. Not on the last stage, whose gradient needs no message.
    """
    places: list[Places] = [_places(entries, BACKWARDS) for entries in schedule.ranks]
    last_rank, last_chunk = schedule.locations[schedule.num_stages - 1]
    places[last_rank] = {unit: place for unit, place in places[last_rank].items() if unit[0] != last_chunk}
    return _with_recomputes(schedule, "recompute-in-advance", places)


def in_bubble(schedule: Schedule, max_live: int | None = None) -> Schedule:
    """Fewest recomputations that keep every rank within a bound: `--recompute-in-bubble`.

    They run before their backward, or earlier where that shortens the step at equal times of stages and passes.

    max_live: chunk activations per rank; default ranks times chunks.
    """
    bound = schedule.num_ranks * schedule.num_chunks if max_live is None else max_live
    if schedule.has_weight_grads:
        raise OrderError(f"{schedule.name}: no recomputation in the bubble beside weight gradients of their own")
    uniform = costs.uniform(schedule.num_stages)
    late: list[Places] = []
    early: list[Places] = []
    for rank, timed in enumerate(simulate(schedule, uniform).ranks):
        late.append(_to_recompute(schedule, rank, bound))
        early.append(_in_gaps(schedule, rank, timed, late[-1], bound))
    orders = [_with_recomputes(schedule, "recompute-in-bubble", places) for places in (late, early)]
    return min(orders, key=lambda each: simulate(each, uniform).makespan)


def _places(entries: Sequence[Entry], kinds: Sequence[Kind]) -> Places:
    return {step[1:]: place for place, each in enumerate(entries) for step in steps_of(each) if step.kind in kinds}


def _with_recomputes(schedule: Schedule, suffix: str, ranks: Sequence[Places]) -> Schedule:
    """Recomputes each unit before its place."""
    changed = []
    for entries, places in zip(schedule.ranks, ranks, strict=True):
        groups: list[list[Entry]] = [[] for _ in entries]
        for unit, place in places.items():
            groups[place].append(recompute(*unit))
        changed.append(tuple(each for group, entry in zip(groups, entries, strict=True) for each in (*group, entry)))
    return replace(schedule, name=f"{schedule.name}+{suffix}", ranks=tuple(changed))


def _to_recompute(schedule: Schedule, rank: int, max_live: int) -> Places:
    """Backwards whose unit is recomputed, so that a rank never holds more than `max_live`.

    Recomputing the unit with the latest backward gives the fewest.
    """
    ends = _places(schedule.ranks[rank], BACKWARDS)
    stored: set[tuple[int, int]] = set()
    marked: dict[tuple[int, int], int] = {}

    def mark_down_to(bound: int) -> None:
        while len(stored) > max(bound, 0):
            latest = max(stored, key=ends.__getitem__)
            stored.remove(latest)
            marked[latest] = ends[latest]

    for step in schedule.steps(rank):
        unit = step[1:]
        if step.kind is Kind.FORWARD:
            stored.add(unit)
        elif step.kind in BACKWARDS and unit not in stored:
            # A recomputed unit is held again during its backward.
            mark_down_to(max_live - 1)
        elif step.kind in BACKWARDS:
            stored.remove(unit)
        mark_down_to(max_live)
    return marked


def _in_gaps(schedule: Schedule, rank: int, timed: Sequence[TimedEntry], units: Places, bound: int) -> Places:
    """Moves each recomputation, of 1 unit of time, into the latest gap that fits."""
    gaps = [each.begin - before for each, before in zip(timed, [0.0, *(t.end for t in timed)], strict=False)]
    begins = _places(schedule.ranks[rank], [Kind.FORWARD])
    live = [each.live for each in costs.held(schedule, rank)]
    for unit, end in units.items():
        for place in range(begins[unit], end):
            live[place] -= 1
    found: dict[tuple[int, int], int] = {}
    for unit, end in sorted(units.items(), key=lambda each: each[1], reverse=True):
        place = end
        while gaps[place] < 1 and place - 1 > begins[unit] and live[place - 1] < bound:
            place -= 1
        place = place if gaps[place] >= 1 else end
        gaps[place] -= 1
        for between in range(place, end):
            live[between] += 1
        found[unit] = place
    # Earlier backwards first.
    return dict(reversed(found.items()))
