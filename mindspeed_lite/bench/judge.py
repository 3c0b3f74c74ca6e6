"""Compares losses and gradient norms of two runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

Steps = Sequence[dict[str, Any]]

CLASSES = ("bitwise", "ulp", "deviation")

# Two runs that each deviate by the rounding baseline differ by at most this factor.
ALLOWED = 2.0


def widest(classes: Sequence[str]) -> str:
    return max(classes, key=CLASSES.index, default="bitwise")


def _distance(x: float | None, y: float | None) -> float:
    """|x - y|; infinite where one is missing or not finite and the other differs."""
    if x == y or (x is not None and y is not None and math.isnan(x) and math.isnan(y)):
        return 0.0
    found = math.inf if x is None or y is None else abs(x - y)
    return math.inf if math.isnan(found) else found


def _loss_distances(first: Steps, second: Steps) -> list[tuple[float, int]]:
    found = []
    for a, b in zip(first, second, strict=False):
        distances = (_distance(a["loss"].get(name), b["loss"].get(name)) for name in {**a["loss"], **b["loss"]})
        found.append((max(distances, default=0.0), a["iteration"]))
    return found


def _rms(distances: Sequence[tuple[float, int]]) -> float:
    return math.sqrt(statistics.fmean(value * value for value, _ in distances)) if distances else 0.0


def _norm_distances(first: Steps, second: Steps) -> list[float]:
    pairs = ((a["grad_norm"], b["grad_norm"]) for a, b in zip(first, second, strict=False))
    return [_distance(x, y) / (abs(x) if x and math.isfinite(x) else 1.0) for x, y in pairs if (x, y) != (None, None)]


def _are_identical(first: Steps, second: Steps) -> bool:
    return not any(value for value, _ in _loss_distances(first, second)) and not any(_norm_distances(first, second))


def compare_losses(
    off: Sequence[Steps], on: Sequence[Steps], numerics: str, rounding_baseline: tuple[str, Steps] | None
) -> dict[str, Any]:
    """The `loss` object of a comparison (docs/bench-report.md).

    Args:
        off, on: steps of each run; runs of an arm are repeats.
        numerics: the promised class.
        rounding_baseline: name and steps.
    """
    pairs = list(zip(off, on, strict=False))
    distances = [_loss_distances(a, b) for a, b in pairs]
    largest, iteration = max((each for row in distances for each in row), key=lambda each: each[0])
    shown = next(pair for pair, row in zip(pairs, distances, strict=True) if (largest, iteration) in row)
    norms = [norm for a, b in pairs for norm in _norm_distances(a, b)]
    rms, baseline, times = max(map(_rms, distances)), None, None
    if rounding_baseline is not None:
        reference = _loss_distances(off[0], rounding_baseline[1])
        allowed = _rms(reference)
        largest_of_baseline = max(reference, default=(0.0, 0))[0]
        kind = rounding_baseline[0]
        baseline = {"kind": kind, "largest_difference": largest_of_baseline, "rms_difference": allowed}
        if allowed and math.isfinite(allowed):
            times = rms / allowed
    found: dict[str, Any] = {
        "class": numerics,
        "largest_difference": largest,
        "rms_difference": rms,
        "step": iteration,
        "grad_norm_difference": max(norms, default=None),
        "series": _series(*shown, rounding_baseline[1] if rounding_baseline else ()),
        "rounding_baseline": baseline,
        "times_rounding_baseline": times,
    }
    verdict, reason = "identical", "every loss and gradient norm has the same bits"
    if not all(_are_identical(a, b) for a, b in pairs):
        verdict, reason = _verdict(found, off)
    return found | {"verdict": verdict, "reason": reason}


def _verdict(found: dict[str, Any], off: Sequence[Steps]) -> tuple[str, str]:
    largest, times = found["largest_difference"], found["times_rounding_baseline"]
    where = f"the losses differ by {largest:.3g} at iteration {found['step']}"
    if not math.isfinite(largest):
        return "differs", f"a loss is missing or not a number in one of the two, first at iteration {found['step']}"
    if found["class"] == "deviation":
        return "documented deviation", f"{where}, as the feature's page says they may"
    if found["class"] == "bitwise":
        if not all(_are_identical(off[0], each) for each in off[1:]):
            own = max(value for each in off[1:] for value, _ in _loss_distances(off[0], each))
            return "not judged", f"off differs from itself by {own:.3g}, so that bits cannot be compared; {where}"
        what = where if largest else f"the gradient norms differ by {found['grad_norm_difference']:.3g}"
        return "differs", f"{what}, and the features promise the same bits"
    if times is None:
        return "not judged", f"{where}; there is no rounding baseline to compare that with"
    text = f"{where}, {times:.2f} times as far as off from {found['rounding_baseline']['kind']}"
    if times > ALLOWED:
        return "differs", f"{text}; rounding explains {ALLOWED:g} times"
    return "agrees", text


def _series(off: Steps, on: Steps, rounding_baseline: Steps) -> list[dict[str, Any]]:
    def first(step: dict[str, Any]) -> float | None:
        return next(iter(step["loss"].values()), None)

    rows = [{"iteration": a["iteration"], "off": first(a), "on": first(b)} for a, b in zip(off, on, strict=False)]
    for row, step in zip(rows, rounding_baseline, strict=False):
        row["rounding_baseline"] = first(step)
    return rows
