"""Tells what was chosen to be kept and to be computed again: a table by pipeline stage and kind of layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from .recompute_choice import LayerChoice, Way, gib


def table(choice: LayerChoice, everything: int, budget: int, stage: int, stages: int) -> str:
    """The choice of one pipeline stage, several lines. everything: the peak where nothing is computed again."""
    where = f" of pipeline stage {stage}" if stages > 1 else ""
    share = ""
    if everything:
        share = f", {1 - choice.peak / everything:.0%} less than the {gib(everything)} of keeping everything"
    lines = [
        f"activations{where}: {gib(choice.peak)} at the peak{share}; the budget is {gib(budget)}",
        f"{'layers':>9}  {'kept each':>11}  {'longer each':>11}  computed again",
    ]
    for first, last, way in runs(choice.ways):
        layers = f"{first + 1}-{last + 1}" if last > first else f"{first + 1}"
        named = ", ".join(sorted(way.again)) or "nothing"
        lines.append(f"{layers:>9}  {gib(way.kept):>11}  {way.seconds * 1e3:>8.2f} ms  {named}")
    proof = "proven to be the least" if choice.gap <= 0 else f"at most {choice.gap:.2%} above the least"
    if math.isinf(choice.gap):
        proof = "which may not be the least"
    lines.append(f"{choice.seconds * 1e3:.2f} ms longer for each micro-batch, {proof}")
    return "\n".join(lines)


def runs(ways: Sequence[Way]) -> list[tuple[int, int, Way]]:
    """Neighbours that run alike: the first, the last, and how."""
    found: list[tuple[int, int, Way]] = []
    for _, group in itertools.groupby(enumerate(ways), key=lambda each: (each[1].again, each[1].kept)):
        members = list(group)
        found.append((members[0][0], members[-1][0], members[0][1]))
    return found
