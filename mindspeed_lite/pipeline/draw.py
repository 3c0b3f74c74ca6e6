"""Draws pipeline schedules as text and PNG."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from .simulate import Simulation, TimedEntry
from .steps import Entry, Kind, OverlappedPair, Step, steps_of
from .trace import ExecutedStep


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
    middles = [(column + 0.5) * simulation.makespan / width for column in range(width)]
    lines = []
    for rank, entries in enumerate(simulation.ranks):
        begins = [timed.begin for timed in entries]
        shown = [_entry_at(now, entries, begins) for now in middles]
        cells = "".join(_cell(entry, len([*run]), color, has_chunks) for entry, run in groupby(shown))
        lines.append(f"rank {rank}".ljust(len(head)) + cells)
    kinds = {step.kind for rank in range(len(simulation.ranks)) for step in schedule.steps(rank)}
    looks = [_LOOKS[kind] for kind in _LOOKS if kind in kinds]
    looks += [_PAIR] if any(isinstance(entry, OverlappedPair) for run in schedule.ranks for entry in run) else []
    legend = ", ".join(f"{look.letter} {look.word}" for look in looks)
    return [*lines, f"{legend}, {_IDLE} idle; numbers are {'chunk:' * has_chunks}micro-batch"]


def _entry_at(now: float, entries: Sequence[TimedEntry], begins: Sequence[float]) -> Entry | None:
    place = bisect_right(begins, now) - 1
    return entries[place].entry if place >= 0 and now < entries[place].end else None


def _cell(entry: Entry | None, size: int, color: bool, has_chunks: bool) -> str:
    if entry is None:
        return " " * size if color else _IDLE * size
    look = _PAIR if isinstance(entry, OverlappedPair) else _LOOKS[entry.kind]
    label = "+".join(
        f"{_LOOKS[step.kind].letter}{f'{step.chunk}:' * has_chunks}{step.microbatch}" for step in steps_of(entry)
    )
    label = label if len(label) <= size else look.letter
    if not color:
        return label.ljust(size, "-")
    return f"\x1b[48;5;{look.background}m\x1b[38;5;16m{label.ljust(size)}\x1b[0m"


class _Bar(NamedTuple):
    rank: int
    step: Step
    begin: float
    seconds: float
    part: int = 0
    parts: int = 1


def png(
    simulations: Mapping[str, Simulation],
    file: str | Path,
    unit: str = "",
    executed: Sequence[ExecutedStep] = (),
) -> None:
    """Write schedules and recorded steps on one time axis in `unit`.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = {
        title: [
            _Bar(rank, step, timed.begin, timed.end - timed.begin, part, len(steps_of(timed.entry)))
            for rank, entries in enumerate(simulation.ranks)
            for timed in entries
            for part, step in enumerate(steps_of(timed.entry))
        ]
        for title, simulation in simulations.items()
    }
    if executed:
        first = min(each.begin for each in executed)
        drawn["executed"] = [_Bar(e.rank, e.step, e.begin - first, e.end - e.begin) for e in executed]
    rows = [1 + max(bar.rank for bar in bars) for bars in drawn.values()]
    figure = Figure(figsize=(14, 1.0 + sum(0.9 + 0.34 * number for number in rows)), layout="constrained")
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=[2.0 + each for each in rows])[:, 0]
    for (title, bars), number, each in zip(drawn.items(), rows, axes, strict=True):
        longest = max(bar.begin + bar.seconds for bar in bars)
        # One artist per row and colour.
        spans: dict[tuple[str, float, float, float], list[tuple[float, float]]] = {}
        for bar in bars:
            height = 0.84 / bar.parts
            low, opacity = bar.rank - 0.42 + height * bar.part, 1.0 - 0.45 * min(bar.step.chunk, 1)
            look = _LOOKS[bar.step.kind].color, opacity, low, height
            spans.setdefault(look, []).append((bar.begin, bar.seconds))
            if bar.seconds / longest > 0.007:
                middle, size = (bar.begin + bar.seconds / 2, low + height / 2), 6 if bar.parts == 1 else 4
                each.text(*middle, str(bar.step.microbatch), ha="center", va="center", fontsize=size, clip_on=True)
        for (color, opacity, low, height), found in spans.items():
            each.broken_barh(found, (low, height), facecolor=color, alpha=opacity, edgecolor="white", linewidth=0.4)
        each.set_title(title, loc="left", fontsize=9)
        each.set_ylim(number - 0.5, -0.5)
        each.set_yticks(range(number), [f"rank {rank}" for rank in range(number)], fontsize=7)
        each.tick_params(axis="x", labelsize=7)
        each.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlabel(f"time{f' ({unit})' if unit else ''}")
    kinds = {bar.step.kind for bars in drawn.values() for bar in bars}
    handles = [Patch(facecolor=look.color, label=look.word) for kind, look in _LOOKS.items() if kind in kinds]
    figure.legend(handles=handles, ncols=5, loc="outside upper right", fontsize=7, frameon=False)
    figure.savefig(file, dpi=110)
