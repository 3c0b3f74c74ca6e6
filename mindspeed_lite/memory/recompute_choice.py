"""Chooses what each layer keeps and what it computes again: the least time within a budget of bytes, exactly.

A layer's ways to run come from its record. How much memory they take together is a sum at every moment that was
recorded, so the choice is an integer program: HiGHS, through `scipy.optimize.milp`, proves its optimum or how far from
it the answer is at most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .layer_records import ACTIVATION, ATTENTION, INPUT_NORM, LAYER, MLP, MLP_NORM, LayerRecord, Moment, SavedStorage

EARLY, LATE = (INPUT_NORM, ATTENTION), (MLP_NORM, ACTIVATION, MLP)
# An answer this near to the optimum is taken, and the search ends after so long in any case.
GAP = 1e-3
LIMIT_SECONDS = 20.0


class BudgetError(ValueError):
    """No choice is within the budget; `least` is what the leanest takes."""

    def __init__(self, least: int, budget: int, stage: int = 0) -> None:
        super().__init__(
            f"activations of pipeline stage {stage} cannot stay within {gib(budget)}: the least possible is "
            f"{gib(least)}, with layers computed again as a whole"
        )
        self.least = least


def gib(size: float) -> str:
    """Bytes in a unit that says something."""
    return f"{size / (1 << 30):.3f} GiB" if size >= (1 << 30) / 100 else f"{size / (1 << 20):.2f} MiB"


@dataclass(frozen=True)
class Way:
    """A way to run a layer.

    Attributes:
        again: the parts that are computed again in the backward pass.
        kept: bytes of a micro-batch. kept_late: of these, what the MLP's half of the layer keeps.
        back_late, back_early: bytes that are back while the backward pass of that half runs.
        seconds: that it takes longer for each micro-batch.
    """

    again: frozenset[str]
    kept: int
    kept_late: int
    back_late: int
    back_early: int
    seconds: float


@dataclass(frozen=True)
class LayerChoice:
    """What was chosen.

    Attributes:
        ways: for each layer. peak: bytes at the fullest moment. seconds: longer for each micro-batch.
        gap: by how much less, as a share, another choice might take; 0 is proven to be the best, infinity: not known.
    """

    ways: tuple[Way, ...]
    peak: int
    seconds: float
    gap: float


def ways(record: LayerRecord, can: frozenset[str]) -> list[Way]:
    """All ways to run a layer that has these parts to compute again, without those that another one beats."""
    parts = [part for part in (*EARLY, *LATE) if part in can and record.cost(part) > 0]
    found = [_way(record, frozenset(again)) for count in range(len(parts) + 1) for again in
             itertools.combinations(parts, count) if not {ACTIVATION, MLP} <= set(again)]  # fmt: skip
    if LAYER in can:
        found.append(_whole(record))
    return [each for each in found if not any(_beats(other, each) for other in found)]


def _beats(one: Way, other: Way) -> bool:
    mine, its = ((w.kept, w.seconds, w.back_late, w.back_early, -w.kept_late) for w in (one, other))
    pairs = list(zip(mine, its, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _way(record: LayerRecord, again: frozenset[str]) -> Way:
    kept = kept_late = late = early = 0
    for each in record.storages:
        if each.parts and _is_gone(each, again):
            is_late = bool(({*each.parts, each.leaves} - {""}) & set(LATE))
            late, early = (late + each.bytes, early) if is_late else (late, early + each.bytes)
        elif each.parts or each.enters in again:
            kept += each.bytes
            kept_late += each.bytes if each.parts <= set(LATE) and each.enters != MLP_NORM else 0
    return Way(again, kept, kept_late, late, early, sum(record.cost(part) for part in again))


def _is_gone(each: SavedStorage, again: frozenset[str]) -> bool:
    """Whether a storage need not be kept; what a part starts from stays, unless it is inside one that runs again."""
    if each.enters in (INPUT_NORM, MLP_NORM):
        return False
    if each.leaves in (INPUT_NORM, MLP_NORM):
        return each.leaves in again
    inside = {MLP, ACTIVATION} if MLP in again else set()
    if each.enters == ACTIVATION or each.leaves == ACTIVATION:
        return bool(inside) or (each.leaves == ACTIVATION and ACTIVATION in again)
    return bool(each.parts) and (each.parts <= inside or (len(each.parts) == 1 and each.parts <= again))


def _whole(record: LayerRecord) -> Way:
    kept = sum(each.bytes for each in record.storages if each.enters == INPUT_NORM)
    back = record.bytes - kept
    return Way(frozenset({LAYER}), kept, 0, back, back, record.cost(LAYER))


def merged(
    several: Sequence[tuple[Sequence[frozenset[str]], Sequence[LayerRecord], Mapping[Moment, int]]],
) -> tuple[list[frozenset[str]], list[LayerRecord], dict[Moment, int]]:
    """Parts, records and moments of the ranks that run the same layers: of each the one that takes most."""
    can = [frozenset.intersection(*each) for each in zip(*(parts for parts, _, _ in several), strict=True)]
    records = []
    for each in zip(*(found for _, found, _ in several), strict=True):
        parts = {part for record in each for part in record.seconds}
        seconds = {part: [max(record.cost(part) for record in each)] for part in parts}
        records.append(LayerRecord(max(each, key=lambda record: record.bytes).storages, seconds))
    moments: dict[Moment, int] = {}
    for _, _, found in several:
        for moment, outside in found.items():
            moments[moment] = max(outside, moments.get(moment, 0))
    return can, records, moments


def peak(chosen: Sequence[Way], moments: Mapping[Moment, int]) -> int:
    """Bytes at the fullest of the moments."""
    found = 0
    for (layer, counts), outside in moments.items():
        kept = sum(count * way.kept for count, way in zip(counts, chosen, strict=True))
        back = 0 if layer < 0 else max(chosen[layer].back_late, chosen[layer].back_early - chosen[layer].kept_late)
        found = max(found, outside + kept + back)
    return found


def choose(options: Sequence[Sequence[Way]], moments: Mapping[Moment, int], budget: int) -> LayerChoice:
    """The ways that take least time within the budget.

    Raises:
        BudgetError: there are none.
    """
    found = _solve(options, moments, budget)
    if found is None:
        # There is none, or the search has ended before it found one.
        found = leanest(options, moments)
        if found.peak > budget:
            raise BudgetError(found.peak, budget)
    return found


def leanest(options: Sequence[Sequence[Way]], moments: Mapping[Moment, int]) -> LayerChoice:
    """The ways that take least memory; where the search for them ended without any, those with the least of a layer."""
    found = _solve(options, moments, None)
    chosen = found.ways if found else tuple(
        min(each, key=lambda way: way.kept + max(way.back_late, way.back_early)) for each in options
    )  # fmt: skip
    return LayerChoice(chosen, peak(chosen, moments), sum(way.seconds for way in chosen), math.inf)


def _solve(options: Sequence[Sequence[Way]], moments: Mapping[Moment, int], budget: int | None) -> LayerChoice | None:
    """Within a budget the least time; without one the least peak."""
    if not options:
        full = peak((), moments)
        return LayerChoice((), full, 0.0, 0.0) if budget is None or full <= budget else None
    import numpy
    from scipy.optimize import Bounds, LinearConstraint, milp

    places = [(layer, way) for layer, each in enumerate(options) for way in each]
    slow = max((way.seconds for _, way in places), default=0.0) or 1.0
    unit = float(max(1, *(way.kept + way.back_late for _, way in places)))
    rows, limits = [], []
    for (inside, counts), outside in moments.items():
        for half in ("late", "early") if inside >= 0 else ("",):
            row = [counts[layer] * way.kept + (_back(way, half) if layer == inside else 0) for layer, way in places]
            rows.append([*(each / unit for each in row), 0.0 if budget is not None else -1.0])
            limits.append(((budget or 0) - outside) / unit)
    one = [[float(layer == at) for layer, _ in places] + [0.0] for at in range(len(options))]
    goal = [way.seconds / slow if budget is not None else 0.0 for _, way in places] + [
        0.0 if budget is not None else 1.0
    ]
    count = len(places)
    solved: Any = milp(
        numpy.array(goal),
        integrality=numpy.array([1] * count + [0]),
        bounds=Bounds(numpy.zeros(count + 1), numpy.array([1.0] * count + [numpy.inf])),
        constraints=[
            LinearConstraint(numpy.array(rows), -numpy.inf, numpy.array(limits)),
            LinearConstraint(numpy.array(one), 1.0, 1.0),
        ],
        options={"mip_rel_gap": GAP, "time_limit": LIMIT_SECONDS},
    )
    if solved.x is None:
        return None
    chosen = tuple(
        max(((solved.x[at], way) for at, (layer, way) in enumerate(places) if layer == number), key=lambda e: e[0])[1]
        for number in range(len(options))
    )
    gap = float(getattr(solved, "mip_gap", 0.0) or 0.0)
    return LayerChoice(chosen, peak(chosen, moments), sum(way.seconds for way in chosen), gap)


def _back(way: Way, half: str) -> int:
    return way.back_late if half == "late" else way.back_early - way.kept_late
