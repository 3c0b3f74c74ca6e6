"""Prints the choice of a pipeline stage, by runs of equal layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from .memory_options import LayerOption
from .recompute_choice import LayerChoice, gib


def table(
    choice: LayerChoice,
    everything: int,
    budget: int,
    stage: int,
    stages: int,
    rates: tuple[float, float] | None = None,
    why_kept: str = "",
) -> str:
    """Formats one stage's choice; everything: peak if everything is kept.

    rates: bytes per second to the host and back; None with the reason `why_kept`.
    """
    where = f" of pipeline stage {stage}" if stages > 1 else ""
    share = ""
    if everything:
        share = f", {1 - choice.peak / everything:.0%} less than the {gib(everything)} of keeping everything"
    lines = [
        f"activations{where}: {gib(choice.peak)} at the peak{share}; the budget is {gib(budget)}",
        f"{'layers':>9}  {'kept each':>11}  {'moved each':>11}  {'longer each':>11}  computed again; moved to the host",
    ]
    for first, last, option, seconds in _runs(choice):
        longer = f"{seconds * 1e3:>8.2f} ms  {_named(option.again, option.swapped)}"
        lines.append(f"{_numbers(first, last):>9}  {gib(option.kept):>11}  {gib(option.moved):>11}  {longer}")
    if rates:
        out, back = (rate / 1e9 for rate in rates)
        shown = sum(choice.exposed) * 1e3
        lines.append(f"copies: {out:.2f} GB/s out, {back:.2f} GB/s back; {shown:.2f} ms do not hide behind compute")
    elif why_kept:
        lines.append(f"nothing is moved to the host: {why_kept}")
    proof = "proven to be the least" if choice.gap <= 0 else f"at most {choice.gap:.2%} above the least"
    if math.isinf(choice.gap):
        proof = "which may not be the least"
    lines.append(f"{choice.seconds * 1e3:.2f} ms longer for each micro-batch, {proof}")
    return "\n".join(lines)


def changes(before: Sequence[tuple[frozenset[str], frozenset[str]]], choice: LayerChoice, what: str, stage: int) -> str:
    """Differences from the earlier choice `before` (parts of each layer), named `what`."""
    pairs = [(old, (option.again, option.swapped)) for old, option in zip(before, choice.options, strict=True)]
    found = []
    for (old, new), group in itertools.groupby(enumerate(pairs), key=lambda each: each[1]):
        numbers = [number for number, _ in group]
        if old != new:
            found.append(f"{_numbers(numbers[0], numbers[-1]):>9}  {_named(*new)} (before: {_named(*old)})")
    if not found:
        return f"no layer of stage {stage} changes from {what}"
    return "\n".join([f"what changes from {what}, stage {stage}: parts that run again; parts that move", *found])


def _numbers(first: int, last: int) -> str:
    return f"{first + 1}-{last + 1}" if last > first else f"{first + 1}"


def _named(again: frozenset[str], swapped: frozenset[str]) -> str:
    return (", ".join(sorted(again)) or "nothing") + (f"; {', '.join(sorted(swapped))}" if swapped else "")


def _runs(choice: LayerChoice) -> list[tuple[int, int, LayerOption, float]]:
    """Runs of equal layers: first, last, option, mean additional seconds."""
    found = []
    longer = [option.seconds + exposed for option, exposed in zip(choice.options, choice.exposed, strict=True)]
    for _, group in itertools.groupby(
        enumerate(choice.options), key=lambda each: (each[1].again, each[1].swapped, each[1].kept)
    ):
        members = list(group)
        first, last = members[0][0], members[-1][0]
        found.append((first, last, members[0][1], sum(longer[first : last + 1]) / len(members)))
    return found
