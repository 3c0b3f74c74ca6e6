"""Chooses what each layer keeps, recomputes and offloads: least time within a memory budget.

An integer program for HiGHS (`scipy.optimize.milp`), solved to optimality or a proven gap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .layer_records import NONE, Instant, LayerRecord
from .memory_options import LayerOption, Transfers, layer_options, transfers

# Relative gap and time limit of the search.
GAP = 1e-3
LIMIT_SECONDS = 20.0
# Of equally fast choices, prefer moving less.
HIDDEN_WEIGHT = 1e-3


class BudgetError(ValueError):
    """No choice fits the budget; `least`: bytes of the leanest."""

    def __init__(self, least: int, budget: int, stage: int = 0) -> None:
        super().__init__(
            f"activations of pipeline stage {stage} cannot stay within {gib(budget)}: the least possible is "
            f"{gib(least)}, whatever is computed again or, on a device, moved to the host"
        )
        self.least = least


def gib(size: float) -> str:
    return f"{size / (1 << 30):.3f} GiB" if size >= (1 << 30) / 100 else f"{size / (1 << 20):.2f} MiB"


@dataclass(frozen=True)
class LayerChoice:
    """The chosen option of each layer.

    peak: bytes. seconds: additional time per micro-batch. gap: maximum relative distance to the optimum; infinity is
    unknown. exposed: seconds per layer that compute waits for copies.
    """

    options: tuple[LayerOption, ...]
    peak: int
    seconds: float
    gap: float
    exposed: tuple[float, ...] = ()

    def table(
        self,
        everything: int,
        budget: int,
        stage: int,
        stages: int,
        rates: tuple[float, float] | None = None,
        why_kept: str = "",
    ) -> str:
        """Format the options of a stage's layers as a table, equal neighbours in one row.

        Args:
            everything: peak bytes if every activation is kept.
            rates: bytes per second to the host and back; None if nothing moves, for the reason `why_kept`.
        """
        where = f" of pipeline stage {stage}" if stages > 1 else ""
        share = ""
        if everything:
            share = f", {1 - self.peak / everything:.0%} less than the {gib(everything)} of keeping everything"
        lines = [
            f"activations{where}: {gib(self.peak)} at the peak{share}; the budget is {gib(budget)}",
            f"{'layers':>9}  {'kept each':>11}  {'moved each':>11}  {'longer each':>11}  "
            "computed again; moved to the host",
        ]
        for _, run in itertools.groupby(
            enumerate(zip(self.options, self.exposed, strict=True), 1),
            key=lambda each: (each[1][0].again, each[1][0].swapped, each[1][0].kept),
        ):
            members = list(run)
            (first, (option, _)), (last, _) = members[0], members[-1]
            longer = sum(each.seconds + exposed for _, (each, exposed) in members) / len(members) * 1e3
            layers = f"{first}-{last}" if last > first else f"{first}"
            again, moved = (", ".join(sorted(each)) for each in (option.again, option.swapped))
            parts = (again or "nothing") + (f"; {moved}" if moved else "")
            lines.append(f"{layers:>9}  {gib(option.kept):>11}  {gib(option.moved):>11}  {longer:>8.2f} ms  {parts}")
        if rates:
            out, back = (rate / 1e9 for rate in rates)
            shown = sum(self.exposed) * 1e3
            lines.append(
                f"copies: {out:.2f} GB/s out, {back:.2f} GB/s back; {shown:.2f} ms do not overlap with compute"
            )
        elif why_kept:
            lines.append(f"nothing is moved to the host: {why_kept}")
        proof = "proven to be the least" if self.gap <= 0 else f"at most {self.gap:.2%} above the least"
        if math.isinf(self.gap):
            proof = "which may not be the least"
        return "\n".join([*lines, f"{self.seconds * 1e3:.2f} ms longer for each micro-batch, {proof}"])


@dataclass
class StageRecord:
    """Records of one rank's layers, or the maximum over a stage's ranks.

    can, swappable: parts of each layer that may be recomputed, offloaded.
    rates: bytes per second to the host and back; None if nothing moves.
    """

    can: list[frozenset[str]]
    layers: list[LayerRecord]
    moments: dict[Instant, int]
    swappable: list[frozenset[str]] = field(default_factory=list)
    rates: tuple[float, float] | None = None

    def options(self) -> list[list[LayerOption]]:
        swappable = self.swappable if self.rates else [frozenset[str]()] * len(self.can)
        return [layer_options(*each) for each in zip(self.layers, self.can, swappable, strict=True)]

    def everything(self) -> int:
        return peak([layer_options(each, frozenset())[0] for each in self.layers], self.moments)

    def transfers(self) -> Transfers | None:
        return transfers(self.layers, *self.rates) if self.rates else None


def merged(several: Sequence[StageRecord]) -> StageRecord:
    """Maximum over ranks; parts that all may recompute or offload."""
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
    return StageRecord(can, records, moments, swappable, slowest)


def peak(chosen: Sequence[LayerOption], moments: Mapping[Instant, int], transfers: Transfers | None = None) -> int:
    found = 0
    for moment, outside in moments.items():
        kept = sum(count * option.kept for count, option in zip(moment.counts, chosen, strict=True))
        here = max(
            sum(_there(option, layer, moment, half, transfers) for layer, option in enumerate(chosen))
            for half in ("late", "early")
        )
        found = max(found, outside + kept + here)
    return found


def choose(
    options: Sequence[Sequence[LayerOption]],
    moments: Mapping[Instant, int],
    budget: int,
    transfers: Transfers | None = None,
) -> LayerChoice:
    """Fastest options. Raises BudgetError if none fits."""
    found = _solve(options, moments, budget, transfers)
    if found is None:
        # Infeasible, or the search timed out.
        found = leanest(options, moments, transfers)
        if found.peak > budget:
            raise BudgetError(found.peak, budget)
    return found


def leanest(
    options: Sequence[Sequence[LayerOption]], moments: Mapping[Instant, int], transfers: Transfers | None = None
) -> LayerChoice:
    """Return the options with the lowest peak memory; each layer's minimum if the solver times out."""
    found = _solve(options, moments, None, transfers)
    chosen = found.options if found else tuple(
        min(each, key=lambda option: option.kept + max(option.back_late, option.back_early)) for each in options
    )  # fmt: skip
    return _choice(chosen, moments, transfers, math.inf)


def _choice(
    chosen: tuple[LayerOption, ...], moments: Mapping[Instant, int], transfers: Transfers | None, gap: float
) -> LayerChoice:
    exposed = transfers.exposed(chosen) if transfers else (0.0,) * len(chosen)
    seconds = sum(option.seconds for option in chosen) + sum(exposed)
    return LayerChoice(chosen, peak(chosen, moments, transfers), seconds, gap, exposed)


def _there(option: LayerOption, layer: int, moment: Instant, half: str, transfers: Transfers | None) -> int:
    """Transient bytes of a layer: recomputed, or not yet offloaded."""
    if moment.layer == NONE:
        return 0
    found = 0
    if layer == moment.layer:
        found += option.moved
        if not moment.is_forward:
            found += option.back_late if half == "late" else option.back_early - option.kept_late
    if transfers is not None and transfers.followers[layer] == moment.layer:
        found += option.moved
    return found


def _binding(moments: Mapping[Instant, int]) -> dict[Instant, int]:
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
    options: Sequence[Sequence[LayerOption]],
    moments: Mapping[Instant, int],
    budget: int | None,
    transfers: Transfers | None,
) -> LayerChoice | None:
    """Minimize the time within the budget or, without a budget, the peak."""
    if not options:
        full = peak((), moments)
        return LayerChoice((), full, 0.0, 0.0) if budget is None or full <= budget else None
    import numpy
    from scipy.optimize import Bounds, LinearConstraint, milp

    places = [(layer, option) for layer, each in enumerate(options) for option in each]
    count, layers = len(places), numpy.array([layer for layer, _ in places])
    seconds, moved = (numpy.array([getattr(option, name) for _, option in places]) for name in ("seconds", "moved"))
    # Variables: places, seconds that compute waits per layer out and back, peak.
    moving = sorted({layer for layer, option in places if option.moved}) if transfers else []
    size = count + 2 * len(moving) + 1
    slow = seconds.max() or 1.0
    unit = float(max(1, *(option.kept + option.back_late for _, option in places)))
    rows: list[Any] = []
    limits: list[float] = []

    def limit(row: Any, at_most: float, variable: int, weight: float) -> None:
        rows.append(numpy.zeros(size))
        rows[-1][:count], rows[-1][variable] = row, weight
        limits.append(at_most)

    for moment, outside in _binding(moments).items():
        if moment.is_forward and not moving:
            continue
        for half in ("late", "early") if moment.layer != NONE and not moment.is_forward else ("late",):
            held = [moment.counts[at] * each.kept + _there(each, at, moment, half, transfers) for at, each in places]
            weight = 0.0 if budget is not None else -1.0
            limit(numpy.array(held) / unit, ((budget or 0) - outside) / unit, size - 1, weight)
    for turn, layer in enumerate(moving):
        assert transfers is not None
        follower, waits, mine = transfers.followers[layer], count + 2 * turn, layers == layer
        limit(mine * moved / transfers.out / slow, transfers.forward[follower] / slow, waits, -1.0)
        back = (mine * moved / transfers.back - (layers == follower) * seconds) / slow
        limit(back, transfers.backward[follower] / slow, waits + 1, -1.0)
    one = numpy.zeros((len(options), size))
    one[layers, numpy.arange(count)] = 1.0
    goal = numpy.zeros(size)
    if budget is None:
        goal[-1] = 1.0
    else:
        hidden = HIDDEN_WEIGHT * (1 / transfers.out + 1 / transfers.back) if transfers else 0.0
        goal[:count], goal[count:-1] = (seconds + moved * hidden) / slow, 1.0
    is_place = numpy.arange(size) < count
    # Empty if all weights of a stage are frozen.
    within = [LinearConstraint(numpy.array(rows), -numpy.inf, numpy.array(limits))] if rows else []
    solved: Any = milp(
        goal,
        integrality=is_place.astype(int),
        bounds=Bounds(numpy.zeros(size), numpy.where(is_place, 1.0, numpy.inf)),
        constraints=[*within, LinearConstraint(one, 1.0, 1.0)],
        options={"mip_rel_gap": GAP, "time_limit": LIMIT_SECONDS},
    )
    if solved.x is None:
        return None
    chosen = tuple(places[int(numpy.argmax(solved.x[:count] * row[:count]))][1] for row in one)
    return _choice(chosen, moments, transfers, float(getattr(solved, "mip_gap", 0.0) or 0.0))
