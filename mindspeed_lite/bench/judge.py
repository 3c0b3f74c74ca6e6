"""Do two trainings tell the same story? Losses and gradient norms against what rounding allows; memory that grows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from mindspeed_lite.bench.statistics import slope

Steps = Sequence[dict[str, Any]]

CLASSES = ("bitwise", "ulp", "deviation")

# Two trainings that each deviate from the exact one as far as the rounding baseline says are this far apart, at most.
ALLOWED = 2.0

# Growth per step that counts as a leak: beyond so many times that of off, and beyond the larger of this share of the
# peak and these bytes.
_HEAP, _LEAK_SHARE, _LEAK_BYTES = 1.5, 0.001, 1 << 20


def widest(classes: Sequence[str]) -> str:
    """The class of several features together."""
    return max(classes, key=CLASSES.index, default="bitwise")


def _differences(first: Steps, second: Steps) -> list[tuple[int, float]]:
    """Iteration and largest difference of its losses; infinite where one is not a number and the other is."""
    found = []
    for a, b in zip(first, second, strict=False):
        worst = 0.0 if set(a["loss"]) == set(b["loss"]) else math.inf
        for name in set(a["loss"]) & set(b["loss"]):
            x, y = a["loss"][name], b["loss"][name]
            if not (math.isfinite(x) and math.isfinite(y)):
                worst = max(worst, 0.0 if _same(x, y) else math.inf)
            else:
                worst = max(worst, abs(x - y))
        found.append((a["iteration"], worst))
    return found


def _same(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))


def _root_mean_square(differences: Sequence[tuple[int, float]]) -> float:
    return math.sqrt(statistics.fmean(value * value for _, value in differences)) if differences else 0.0


def _identical(first: Steps, second: Steps) -> bool:
    return all(value == 0.0 for _, value in _differences(first, second)) and all(
        _same(a["grad_norm"], b["grad_norm"]) for a, b in zip(first, second, strict=False)
    )


def _norm_difference(first: Steps, second: Steps) -> float | None:
    """The largest relative difference of the gradient norms."""
    found = [
        0.0 if _same(a["grad_norm"], b["grad_norm"]) else abs(a["grad_norm"] - b["grad_norm"]) / abs(a["grad_norm"])
        for a, b in zip(first, second, strict=False)
        if a["grad_norm"] and b["grad_norm"] is not None
    ]
    return max((math.inf if math.isnan(value) else value for value in found), default=None)


def compare_losses(
    off: Sequence[Steps], on: Sequence[Steps], numerics: str, rounding_baseline: tuple[str, Steps] | None
) -> dict[str, Any]:
    """The `loss` object of a comparison (see docs/bench-report.md).

    Args:
        off, on: the steps of each run; the runs of one arm are repeats.
        numerics: the class that the features promise.
        rounding_baseline: what the third training is, and its steps.
    """
    pairs = list(zip(off, on, strict=False))
    differences = [_differences(a, b) for a, b in pairs]
    iteration, largest = max((pair for each in differences for pair in each), key=lambda pair: pair[1])
    # The curves are those of the repeat in which that was: what a plot shows is what the words say.
    shown = next(pair for pair, each in zip(pairs, differences, strict=True) if (iteration, largest) in each)
    norms = [norm for a, b in pairs if (norm := _norm_difference(a, b)) is not None]
    rms = max(map(_root_mean_square, differences))
    found: dict[str, Any] = {
        "class": numerics,
        "largest_difference": largest,
        "rms_difference": rms,
        "step": iteration,
        "grad_norm_difference": max(norms, default=None),
        "series": _series(*shown, rounding_baseline[1] if rounding_baseline else None),
        "rounding_baseline": None,
        "times_rounding_baseline": None,
    }
    own = max((value for each in off[1:] for _, value in _differences(off[0], each)), default=0.0)
    deterministic = all(_identical(off[0], each) for each in off[1:])
    if rounding_baseline is not None:
        reference = _differences(off[0], rounding_baseline[1])
        allowed = _root_mean_square(reference)
        found["rounding_baseline"] = {
            "kind": rounding_baseline[0],
            "largest_difference": max((value for _, value in reference), default=0.0),
            "rms_difference": allowed,
        }
        found["times_rounding_baseline"] = rms / allowed if allowed > 0 and math.isfinite(allowed) else None
    found["verdict"], found["reason"] = _loss_verdict(
        found, all(_identical(a, b) for a, b in pairs), own if not deterministic else None
    )
    return found


def _loss_verdict(found: dict[str, Any], identical: bool, own: float | None) -> tuple[str, str]:
    if identical:
        return "identical", "every loss and gradient norm has the same bits"
    where = f"by {found['largest_difference']:.3g} at iteration {found['step']}"
    if not math.isfinite(found["largest_difference"]):
        return "differs", f"a loss is missing or not a number in one of the two, first at iteration {found['step']}"
    if found["class"] == "deviation":
        return "documented deviation", f"the losses differ {where}, as the feature's page says they may"
    if found["class"] == "bitwise":
        if own is not None:
            return "not judged", (
                f"off differs from itself by {own:.3g}, so that equality of bits cannot be asked for; "
                f"the losses differ {where}"
            )
        norm = found["grad_norm_difference"]
        what = (
            f"the losses differ {where}" if found["largest_difference"] else f"the gradient norms differ by {norm:.3g}"
        )
        return "differs", f"{what}, and the features promise the same bits"
    times = found["times_rounding_baseline"]
    if times is None:
        return "not judged", f"the losses differ {where}; there is no rounding baseline to hold that against"
    text = f"the losses differ {where}, {times:.2f} times as far as off from {found['rounding_baseline']['kind']}"
    if times > ALLOWED:
        return "differs", f"{text}; rounding explains {ALLOWED:g} times"
    return "agrees", text


def _series(off: Steps, on: Steps, rounding_baseline: Steps | None) -> list[dict[str, Any]]:
    """The first loss of each iteration, side by side."""

    def first(step: dict[str, Any]) -> float | None:
        return next(iter(step["loss"].values()), None)

    rows = [{"iteration": a["iteration"], "off": first(a), "on": first(b)} for a, b in zip(off, on, strict=False)]
    for row, step in zip(rows, rounding_baseline or (), strict=False):
        row["rounding_baseline"] = first(step)
    return rows


def compare_growth(off: Sequence[Steps], on: Sequence[Steps], peak: float) -> dict[str, Any]:
    """The `growth` object of a comparison: memory that a training gains with every step."""

    # What is in use tells a leak from a heap that settles; where it is not known, all that is resident.
    steps = [step for run in (*off, *on) for step in run if step["measured"]]
    figure = "memory_bytes" if any(step["live_bytes"] is None for step in steps) else "live_bytes"

    def growth(runs: Sequence[Steps]) -> list[float]:
        return [slope([step[figure] for step in run if step["measured"]]) for run in runs]

    # A leak is in every run, and stands out of what off does: a heap may grow for a while by itself.
    before, after = max(growth(off)), min(growth(on))
    grows = after > _HEAP * max(before, 0.0) + max(_LEAK_SHARE * peak, _LEAK_BYTES)
    verdict = "grows" if grows else "steady"
    return {"figure": figure, "bytes_per_step_off": before, "bytes_per_step_on": after, "verdict": verdict}
