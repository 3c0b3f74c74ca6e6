"""Draws pipeline schedules, ranks as rows and time to the right: as text for a terminal, and as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .simulate import Simulation, TimedEntry
from .steps import Entry, Kind, OverlappedPair, Step, steps_of
from .trace import ExecutedStep

# One letter each, where there is room for no more; an overlapped pair is X.
_LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT_GRAD: "I", Kind.WEIGHT_GRAD: "W", Kind.RECOMPUTE: "R"}
_PAIR_LETTER = "X"
_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradients",
    Kind.RECOMPUTE: "recomputation",
}
# 256-colour backgrounds of a terminal.
_BACKGROUNDS = {"F": 68, "B": 173, "I": 179, "W": 108, "R": 139, "X": 98}
# Okabe and Ito's colours, lighter for each further chunk.
_COLORS = {
    Kind.FORWARD: "#0072b2",
    Kind.BACKWARD: "#d55e00",
    Kind.INPUT_GRAD: "#e69f00",
    Kind.WEIGHT_GRAD: "#009e73",
    Kind.RECOMPUTE: "#cc79a7",
}
_IDLE = "."


def text(simulation: Simulation, columns: int, color: bool = False) -> list[str]:
    """Return a line for each rank, of at most `columns` characters, and a legend.

    A step shows its kind, chunk and micro-batch as far as they fit. Columns shorter than a step are letters alone.
    """
    head = f"rank {len(simulation.ranks) - 1} "
    width = columns - len(head)
    lines = []
    for rank, entries in enumerate(simulation.ranks):
        runs = _runs(entries, simulation.makespan, width)
        has_chunks = simulation.schedule.num_chunks > 1
        cells = "".join(_cell(entry, size, color, has_chunks) for entry, size in runs)
        lines.append(f"rank {rank}".ljust(len(head)) + cells)
    return [*lines, legend(simulation)]


def legend(simulation: Simulation) -> str:
    """Return what the letters of a drawing stand for."""
    kinds = {step.kind for rank in range(len(simulation.ranks)) for step in simulation.schedule.steps(rank)}
    parts = [f"{_LETTERS[kind]} {_WORDS[kind]}" for kind in _LETTERS if kind in kinds]
    if any(isinstance(entry, OverlappedPair) for entries in simulation.schedule.ranks for entry in entries):
        parts.append(f"{_PAIR_LETTER} forward and backward overlapped")
    named = "chunk:micro-batch" if simulation.schedule.num_chunks > 1 else "micro-batch"
    return f"{', '.join(parts)}, {_IDLE} idle; numbers are {named}"


def _runs(entries: Sequence[TimedEntry], makespan: float, width: int) -> list[tuple[Entry | None, int]]:
    """What stands in which number of columns: each column shows what runs in its middle."""
    runs: list[tuple[Entry | None, int]] = []
    place, previous = 0, -1
    for column in range(width if makespan else 0):
        now = (column + 0.5) * makespan / width
        while place < len(entries) and entries[place].end <= now:
            place += 1
        runs_now = place < len(entries) and entries[place].begin <= now
        current = place if runs_now else -2
        if current == previous and runs:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((entries[place].entry if runs_now else None, 1))
        previous = current
    return runs


def _cell(entry: Entry | None, size: int, color: bool, has_chunks: bool) -> str:
    if entry is None:
        return " " * size if color else _IDLE * size
    letter = _PAIR_LETTER if isinstance(entry, OverlappedPair) else _LETTERS[entry.kind]
    labels = [_label(entry, has_chunks), letter]
    label = next(each for each in labels if len(each) <= size or len(each) == 1)
    if not color:
        return label.ljust(size, "-")
    return f"\x1b[48;5;{_BACKGROUNDS[letter]}m\x1b[38;5;16m{label.ljust(size)}\x1b[0m"


def _label(entry: Entry, has_chunks: bool) -> str:
    return "+".join(
        f"{_LETTERS[step.kind]}{f'{step.chunk}:' if has_chunks else ''}{step.microbatch}" for step in steps_of(entry)
    )


def png(
    simulations: Mapping[str, Simulation],
    file: str | Path,
    unit: str = "",
    executed: Sequence[ExecutedStep] = (),
) -> None:
    """Write schedules below each other, with one axis of time.

    simulations: title -> what is drawn. unit: of time. executed: what a run recorded, drawn below the first schedule.
    Raises ImportError if matplotlib is not there, OSError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = [len(each.ranks) for each in simulations.values()] + ([len({e.rank for e in executed})] if executed else [])
    figure = Figure(figsize=(14, 1.0 + sum(0.9 + 0.34 * number for number in rows)), layout="constrained")
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=[2.0 + each for each in rows])
    for (title, simulation), each in zip(simulations.items(), axes[:, 0], strict=False):
        _draw(each, [(rank, *timed) for rank, entries in enumerate(simulation.ranks) for timed in _bars(entries)])
        _finish(each, title, len(simulation.ranks))
    if executed:
        begin = min(each.begin for each in executed)
        bars = [(each.rank, each.step, each.begin - begin, each.end - each.begin, 0.0, 1.0) for each in executed]
        _draw(axes[-1, 0], bars)
        _finish(axes[-1, 0], "executed", rows[-1])
    axes[-1, 0].set_xlabel(f"time{f' ({unit})' if unit else ''}")
    figure.legend(handles=_handles(simulations.values()), ncols=5, loc="outside upper right", fontsize=7, frameon=False)
    figure.savefig(file, dpi=110)


_Bar = tuple[int, Step, float, float, float, float]


def _bars(entries: Sequence[TimedEntry]) -> list[tuple[Step, float, float, float, float]]:
    """Step, begin, length, and the part of the row's height; the steps of a pair share the row."""
    found = []
    for timed in entries:
        parts = steps_of(timed.entry)
        for place, step in enumerate(parts):
            height = 1 / len(parts)
            found.append((step, timed.begin, timed.end - timed.begin, place * height, height))
    return found


def _draw(axes: Any, bars: Sequence[_Bar]) -> None:
    longest = max((begin + length for _, _, begin, length, _, _ in bars), default=1.0)
    # One object for all bars of a row and colour: a large schedule has tens of thousands.
    alike: dict[tuple[Kind, float, float, float], list[tuple[float, float]]] = {}
    for rank, step, begin, length, offset, height in bars:
        low, opacity = rank - 0.42 + 0.84 * offset, 1.0 - 0.45 * min(step.chunk, 1)
        alike.setdefault((step.kind, opacity, low, 0.84 * height), []).append((begin, length))
        if length / longest > 0.007:
            size = 6 if height == 1 else 4
            middle = (begin + length / 2, low + 0.42 * height)
            axes.text(*middle, str(step.microbatch), ha="center", va="center", fontsize=size, clip_on=True)
    for (kind, opacity, low, height), spans in alike.items():
        color = _COLORS[kind]
        axes.broken_barh(spans, (low, height), facecolor=color, alpha=opacity, edgecolor="white", linewidth=0.4)


def _finish(axes: Any, title: str, ranks: int) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _handles(simulations: Any) -> list[Any]:
    from matplotlib.patches import Patch

    kinds = {step.kind for each in simulations for rank in range(len(each.ranks)) for step in each.schedule.steps(rank)}
    return [Patch(facecolor=_COLORS[kind], label=_WORDS[kind]) for kind in _COLORS if kind in kinds]
