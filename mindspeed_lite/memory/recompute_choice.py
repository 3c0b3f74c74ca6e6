"""Chooses what each layer keeps, computes again and moves to the host: the least time within a budget, exactly.

A layer's ways to run come from its record. How much memory they take together is a sum at every moment that was
recorded, and a copy costs what it takes longer than the compute it hides behind, so the choice is an integer program:
HiGHS, through `scipy.optimize.milp`, proves its optimum or how far from it the answer is at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .layer_records import NONE, Instant, LayerRecord
from .layer_ways import Transfers, Way, transfers, ways

# An answer this near to the optimum is taken, and the search ends after so long in any case.
GAP = 1e-3
LIMIT_SECONDS = 20.0
# Of choices that take the same time, the one that moves less: a second of hidden copies weighs so many seconds.
HIDDEN_WEIGHT = 1e-3


class BudgetError(ValueError):
    """No choice is within the budget; `least` is what the leanest takes."""

    def __init__(self, least: int, budget: int, stage: int = 0) -> None:
        super().__init__(
            f"activations of pipeline stage {stage} cannot stay within {gib(budget)}: the least possible is "
            f"{gib(least)}, whatever is computed again or, on a device, moved to the host"
        )
        self.least = least


def gib(size: float) -> str:
    """Bytes in a unit that says something."""
    return f"{size / (1 << 30):.3f} GiB" if size >= (1 << 30) / 100 else f"{size / (1 << 20):.2f} MiB"


@dataclass(frozen=True)
class LayerChoice:
    """What was chosen.

    Attributes:
        ways: for each layer. exposed: seconds for each micro-batch that compute waits for its copies.
        peak: bytes at the fullest moment. seconds: longer for each micro-batch.
        gap: by how much less, as a share, another choice might take; 0 is proven to be the best, infinity: not known.
    """

    ways: tuple[Way, ...]
    peak: int
    seconds: float
    gap: float
    exposed: tuple[float, ...] = ()


@dataclass
class StageRecord:
    """What was recorded of layers, by a rank or as the most of several ranks that run the same ones.

    Attributes:
        can: for each layer the parts that may be computed again. swappable: those that may be moved to the host.
        rates: bytes a second to the host and back; None where nothing moves.
        smallest: bytes from which on a storage moves.
    """

    can: list[frozenset[str]]
    layers: list[LayerRecord]
    moments: dict[Instant, int]
    swappable: list[frozenset[str]] = field(default_factory=list)
    rates: tuple[float, float] | None = None
    smallest: int = 0

    def options(self) -> list[list[Way]]:
        """The ways to run each layer."""
        swappable = self.swappable if self.rates else [frozenset[str]()] * len(self.can)
        return [
            ways(record, can, movable, self.smallest)
            for record, can, movable in zip(self.layers, self.can, swappable, strict=True)
        ]

    def everything(self) -> int:
        """The peak where everything is kept."""
        return peak([ways(each, frozenset())[0] for each in self.layers], self.moments)

    def transfers(self) -> Transfers | None:
        """How copies run beside the layers."""
        return transfers(self.layers, *self.rates) if self.rates else None


def merged(several: Sequence[StageRecord]) -> StageRecord:
    """Parts, records and moments of the ranks that run the same layers: of each the one that takes most."""
    can = [frozenset.intersection(*each) for each in zip(*(one.can for one in several), strict=True)]
    swappable = [frozenset.intersection(*each) for each in zip(*(one.swappable for one in several), strict=True)]
    records = []
    for each in zip(*(one.layers for one in several), strict=True):
        parts = {part for record in each for part in record.seconds}
        seconds = {part: [max(record.cost(part) for record in each)] for part in parts}
        fullest = max(each, key=lambda record: record.bytes)
        records.append(LayerRecord(fullest.storages, seconds, fullest.follower, fullest.is_first))
    moments: dict[Instant, int] = {}
    for one in several:
        for moment, outside in one.moments.items():
            moments[moment] = max(outside, moments.get(moment, 0))
    rates = [one.rates for one in several if one.rates]
    slowest = (min(out for out, _ in rates), min(back for _, back in rates)) if len(rates) == len(several) else None
    return StageRecord(can, records, moments, swappable, slowest, max(one.smallest for one in several))


def peak(chosen: Sequence[Way], moments: Mapping[Instant, int], transfers: Transfers | None = None) -> int:
    """Bytes at the fullest of the moments."""
    found = 0
    for moment, outside in moments.items():
        kept = sum(count * way.kept for count, way in zip(moment.counts, chosen, strict=True))
        here = max(
            sum(_there(way, layer, moment, half, transfers) for layer, way in enumerate(chosen))
            for half in ("late", "early")
        )
        found = max(found, outside + kept + here)
    return found


def choose(
    options: Sequence[Sequence[Way]],
    moments: Mapping[Instant, int],
    budget: int,
    transfers: Transfers | None = None,
) -> LayerChoice:
    """The ways that take least time within the budget.

    Raises:
        BudgetError: there are none.
    """
    found = _solve(options, moments, budget, transfers)
    if found is None:
        # There is none, or the search has ended before it found one.
        found = leanest(options, moments, transfers)
        if found.peak > budget:
            raise BudgetError(found.peak, budget)
    return found


def leanest(
    options: Sequence[Sequence[Way]], moments: Mapping[Instant, int], transfers: Transfers | None = None
) -> LayerChoice:
    """The ways that take least memory; where the search for them ended without any, those with the least of a layer."""
    found = _solve(options, moments, None, transfers)
    chosen = found.ways if found else tuple(
        min(each, key=lambda way: way.kept + max(way.back_late, way.back_early)) for each in options
    )  # fmt: skip
    return _choice(chosen, moments, transfers, math.inf)


def _choice(
    chosen: tuple[Way, ...], moments: Mapping[Instant, int], transfers: Transfers | None, gap: float
) -> LayerChoice:
    exposed = transfers.exposed(chosen) if transfers else (0.0,) * len(chosen)
    seconds = sum(way.seconds for way in chosen) + sum(exposed)
    return LayerChoice(chosen, peak(chosen, moments, transfers), seconds, gap, exposed)


def _there(way: Way, layer: int, moment: Instant, half: str, transfers: Transfers | None) -> int:
    """Bytes of a layer that are there at a moment beside what it keeps: what is back, and what is about to move."""
    if moment.layer == NONE:
        return 0
    found = 0
    if layer == moment.layer:
        found += way.moved
        if not moment.is_forward:
            found += way.back_late if half == "late" else way.back_early - way.kept_late
    if transfers is not None and transfers.followers[layer] == moment.layer:
        found += way.moved
    return found


def _binding(moments: Mapping[Instant, int]) -> dict[Instant, int]:
    """The moments at which no choice takes less than at another one of the same layer and pass."""
    found: dict[Instant, int] = {}
    for moment, outside in sorted(moments.items(), key=lambda each: (sum(each[0].counts), each[1]), reverse=True):
        if not any(
            (one.layer, one.is_forward) == (moment.layer, moment.is_forward)
            and size >= outside
            and all(a >= b for a, b in zip(one.counts, moment.counts, strict=True))
            for one, size in found.items()
        ):
            found[moment] = outside
    return found


def _solve(
    options: Sequence[Sequence[Way]],
    moments: Mapping[Instant, int],
    budget: int | None,
    transfers: Transfers | None,
) -> LayerChoice | None:
    """Within a budget the least time; without one the least peak."""
    if not options:
        full = peak((), moments)
        return LayerChoice((), full, 0.0, 0.0) if budget is None or full <= budget else None
    import numpy
    from scipy.optimize import Bounds, LinearConstraint, milp

    places = [(layer, way) for layer, each in enumerate(options) for way in each]
    count = len(places)
    # Behind the places: seconds that compute waits for each layer's copies to the host and back, and the peak.
    moving = sorted({layer for layer, way in places if way.moved}) if transfers else []
    size = count + 2 * len(moving) + 1
    slow = max((way.seconds for _, way in places), default=0.0) or 1.0
    unit = float(max(1, *(way.kept + way.back_late for _, way in places)))
    rows: list[list[float]] = []
    limits: list[float] = []

    def limit(row: Sequence[float], at_most: float, other: int, weight: float) -> None:
        rows.append([*row, *[0.0] * (size - count)])
        rows[-1][other] = weight
        limits.append(at_most)

    for moment, outside in _binding(moments).items():
        # Without copies a forward pass never has more than is there at its end.
        if moment.is_forward and not moving:
            continue
        for half in ("late", "early") if moment.layer != NONE and not moment.is_forward else ("late",):
            row = [moment.counts[at] * way.kept + _there(way, at, moment, half, transfers) for at, way in places]
            limit(
                [each / unit for each in row],
                ((budget or 0) - outside) / unit,
                size - 1,
                0.0 if budget is not None else -1.0,
            )
    for turn, layer in enumerate(moving):
        assert transfers is not None
        behind, waits = transfers.followers[layer], count + 2 * turn
        out = [way.moved / transfers.out / slow if at == layer else 0.0 for at, way in places]
        limit(out, transfers.forward[behind] / slow, waits, -1.0)
        back = [
            way.moved / transfers.back / slow if at == layer else -way.seconds / slow if at == behind else 0.0
            for at, way in places
        ]
        limit(back, transfers.backward[behind] / slow, waits + 1, -1.0)
    one = [[float(layer == at) for layer, _ in places] + [0.0] * (size - count) for at in range(len(options))]
    goal = [0.0] * (size - 1) + [1.0]
    if budget is not None:
        hidden = HIDDEN_WEIGHT * (1 / transfers.out + 1 / transfers.back) if transfers else 0.0
        goal = [(way.seconds + way.moved * hidden) / slow for _, way in places] + [1.0] * (2 * len(moving)) + [0.0]
    solved: Any = milp(
        numpy.array(goal),
        integrality=numpy.array([1] * count + [0] * (size - count)),
        bounds=Bounds(numpy.zeros(size), numpy.array([1.0] * count + [numpy.inf] * (size - count))),
        constraints=[
            # A stage whose weights are all frozen may have no moment at which anything counts.
            *([LinearConstraint(numpy.array(rows), -numpy.inf, numpy.array(limits))] if rows else []),
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
    return _choice(chosen, moments, transfers, float(getattr(solved, "mip_gap", 0.0) or 0.0))
