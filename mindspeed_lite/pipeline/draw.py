"""Draws pipeline schedules as text and PNG."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from .simulate import Simulation
from .steps import Entry, Kind, OverlappedPair, steps_of


class _Look(NamedTuple):
    letter: str
    word: str
    background: int
    color: str


# Okabe-Ito colours, lighter for each further chunk.
_LOOKS = {
    Kind.FORWARD: _Look("F", "forward", 68, "#0072b2"),
    Kind.BACKWARD: _Look("B", "backward", 173, "#d55e00"),
    Kind.INPUT_GRAD: _Look("I", "input gradient", 179, "#e69f00"),
    Kind.WEIGHT_GRAD: _Look("W", "weight gradients", 108, "#009e73"),
    Kind.RECOMPUTE: _Look("R", "recomputation", 139, "#cc79a7"),
}
_PAIR = _Look("X", "forward and backward overlapped", 98, "")
_IDLE = "."


def text(simulation: Simulation, columns: int, color: bool = False) -> list[str]:
    """A line of at most `columns` characters per rank, and a legend."""
    head, schedule = f"rank {len(simulation.ranks) - 1} ", simulation.schedule
    width, has_chunks = columns - len(head), schedule.num_chunks > 1

    def cell(entry: Entry | None, size: int) -> str:
        if entry is None:
            return (" " if color else _IDLE) * size
        look = _PAIR if isinstance(entry, OverlappedPair) else _LOOKS[entry.kind]
        chunks = [f"{step.chunk}:" * has_chunks for step in steps_of(entry)]
        steps = zip(steps_of(entry), chunks, strict=True)
        label = "+".join(f"{_LOOKS[step.kind].letter}{chunk}{step.microbatch}" for step, chunk in steps)
        label = label if len(label) <= size else look.letter
        return f"\x1b[48;5;{look.background}m\x1b[38;5;16m{label:{size}}\x1b[0m" if color else f"{label:-<{size}}"

    lines = []
    for rank, entries in enumerate(simulation.ranks):
        shown: list[Entry | None] = []
        for column in range(width):
            now = (column + 0.5) * simulation.makespan / width
            place = bisect_right(entries, now, key=lambda timed: timed.begin) - 1
            shown.append(entries[place].entry if place >= 0 and now < entries[place].end else None)
        cells = "".join(cell(entry, len([*run])) for entry, run in groupby(shown))
        lines.append(f"rank {rank}".ljust(len(head)) + cells)
    looks = [_LOOKS[kind] for kind in Kind if schedule.units[kind]]
    looks += [_PAIR] if any(isinstance(entry, OverlappedPair) for run in schedule.ranks for entry in run) else []
    legend = ", ".join(f"{look.letter} {look.word}" for look in looks)
    return [*lines, f"{legend}, {_IDLE} idle; a number is the {'chunk:' * has_chunks}micro-batch"]


def png(simulations: Mapping[str, Simulation], file: str | Path, unit: str = "") -> None:
    """Plot simulated and recorded training steps, one panel per title, on a shared time axis in `unit`.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [len(each.ranks) for each in simulations.values()]
    figure = Figure(figsize=(14, 1.0 + sum(0.9 + 0.34 * number for number in rows)), layout="constrained")
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=[2.0 + each for each in rows])[:, 0]
    for (title, simulation), number, each in zip(simulations.items(), rows, axes, strict=True):
        # One artist per row and colour.
        spans: dict[tuple[str, float, float, float], list[tuple[float, float]]] = {}
        for rank, entries in enumerate(simulation.ranks):
            for timed in entries:
                steps, seconds = steps_of(timed.entry), timed.end - timed.begin
                height = 0.84 / len(steps)
                for part, step in enumerate(steps):
                    low, opacity = rank - 0.42 + height * part, 1.0 - 0.45 * min(step.chunk, 1)
                    look = _LOOKS[step.kind].color, opacity, low, height
                    spans.setdefault(look, []).append((timed.begin, seconds))
                    if seconds / simulation.makespan > 0.007:
                        middle = timed.begin + seconds / 2, low + height / 2
                        label, size = str(step.microbatch), 6 if len(steps) == 1 else 4
                        each.text(*middle, label, ha="center", va="center", fontsize=size, clip_on=True)
        for (color, opacity, low, height), found in spans.items():
            each.broken_barh(found, (low, height), facecolor=color, alpha=opacity, edgecolor="white", linewidth=0.4)
        each.set_title(title, loc="left", fontsize=9)
        each.set_ylim(number - 0.5, -0.5)
        each.set_yticks(range(number), [f"rank {rank}" for rank in range(number)], fontsize=7)
        each.tick_params(axis="x", labelsize=7)
        each.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlabel(f"time{f' ({unit})' if unit else ''}")
    looks = [_LOOKS[kind] for kind in Kind if any(each.schedule.units[kind] for each in simulations.values())]
    handles = [Patch(facecolor=look.color, label=look.word) for look in looks]
    figure.legend(handles=handles, ncols=5, loc="outside upper right", fontsize=7, frameon=False)
    figure.savefig(file, dpi=110)
