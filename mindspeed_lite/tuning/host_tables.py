"""Rows of the tables of host synchronisations and launches; imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

PASSES = ("forward", "recompute", "backward")
SYNCHRONIZATION_HEADERS = ("calls", "call", "where")


def synchronization_rows(counts: Counter[tuple[str, str]]) -> list[tuple[str, ...]]:
    found = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return [(str(count), call, place) for (call, place), count in found]


def module_rows(
    launches: Mapping[tuple[str, str], int], calls: Mapping[str, int],
    seconds: Mapping[tuple[str, str], Sequence[float]],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:  # fmt: skip
    """Headers and rows: launches of a call of a module by pass, those of modules within included, and time if known."""
    passes = [each for each in PASSES if any(during == each for _, during in launches)]
    timed = passes if seconds else []
    rows = []
    for kind in sorted(filter(_is_shown, calls)):
        within = {each: n for each, n in launches.items() if f"{each[0]}.".startswith(f"{kind}." if kind else "")}
        if not within:
            continue
        by_pass = [sum(n for (_, during), n in within.items() if during == each) for each in passes]
        times = [seconds.get((kind, each), ()) for each in timed]
        rows.append((
            kind or "model", str(calls[kind]), *(_figure(each / max(1, calls[kind])) for each in by_pass),
            *(f"{1000 * sum(each) / len(each):.2f}" if each else "-" for each in times),
        ))  # fmt: skip
    return ("module", "calls", *(f"{each} launches" for each in passes), *(f"{each} ms" for each in timed)), rows


def _is_shown(kind: str) -> bool:
    """A layer, its parts, and modules outside of layers."""
    return kind.partition(".*")[2].count(".") <= 1


def _figure(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
