"""Each plot as a matplotlib figure, or None where the report has nothing for it. Imported only by `plots`."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from .plot_theme import Theme
from .wording import Json, dig, items, number, percent, plain, seconds, size

_WIDTH = 9.0
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
# Of a figure, so that it is no taller than a page.
_CASES_OF_PAGE = 10


def step_time(report: Json, look: Theme) -> Figure | None:
    """Every measured step as a dot, a lane per run; the bar spans 10 % to 90 %, the tick is the median."""
    lanes = []
    for arm in items(report, "arms"):
        runs = [
            [
                value
                for step in items(run, "steps")
                if dig(step, "measured") and (value := _finite(dig(step, "seconds")))
            ]
            for run in items(arm, "runs")
        ]
        if any(runs):
            lanes.append((arm, [run for run in runs if run]))
    if not lanes:
        return None
    figure, axes = _rows([_name(arm) for arm, _ in lanes], 0.62, "Step time")
    for place, (arm, runs) in enumerate(lanes):
        color = look.arm(_name(arm))
        low, high, median = (
            _finite(dig(arm, "summary", key)) for key in ("step_seconds_p10", "step_seconds_p90", "step_seconds")
        )
        if low is not None and high is not None:
            axes.barh(place, high - low, left=low, height=0.72, color=color, alpha=0.22, linewidth=0)
        for lane, run in enumerate(runs):
            shift = 0.0 if len(runs) == 1 else -0.24 + 0.48 * lane / (len(runs) - 1)
            axes.plot(run, [place + shift] * len(run), "o", color=color, markersize=3.4, alpha=0.75, markeredgewidth=0)
        if median is not None:
            axes.plot([median, median], [place - 0.4, place + 0.4], color=look.text, linewidth=2, solid_capstyle="butt")
            _beside(axes, place, seconds(median))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(seconds(float(f"{value:.6g}")))))
    axes.use_sticky_edges = False
    axes.margins(x=0.04)
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.set_xlabel("dots: steps, a lane per run; bar: 10 % to 90 %; tick and number: median")
    return figure


def memory(report: Json, look: Theme) -> Figure | None:
    """The peak of the largest process; the whisker spans the runs."""
    arms = [arm for arm in items(report, "arms") if _finite(dig(arm, "summary", "peak_memory_bytes")) is not None]
    if not arms:
        return None
    figure, axes = _rows([_name(arm) for arm in arms], 0.46, "Peak memory of the largest process")
    for place, arm in enumerate(arms):
        peak = _finite(dig(arm, "summary", "peak_memory_bytes")) or 0.0
        axes.barh(place, peak, height=0.62, color=look.arm(_name(arm)))
        peaks = [max(found) for run in items(arm, "runs") if (found := _numbers(dig(run, "peak_memory_bytes")))]
        if len(peaks) > 1:
            axes.plot([min(peaks), max(peaks)], [place, place], color=look.text, linewidth=1.4)
        _beside(axes, place, size(peak))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(size(value))))
    axes.set_xlabel("median of the runs; line: smallest to largest run")
    return figure


def loss(report: Json, look: Theme) -> Figure | None:
    """The curves over each other, and below how far each is from off, next to the rounding baseline."""
    shown = [each for each in items(report, "comparisons") if items(each, "loss", "series")]
    if not shown:
        return None
    figure = Figure(figsize=(_WIDTH, 5.6 + 0.2 * len(shown)), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for axes in (upper, lower):
        axes.grid(True)
    series = items(shown[0], "loss", "series")
    upper.plot(*_curve(series, "off"), color=look.off, linewidth=5, alpha=0.55, label="off", solid_capstyle="round")
    drawn = crosses = False
    for place, comparison in enumerate(shown):
        name = plain(dig(comparison, "arm")) or "?"
        series = items(comparison, "loss", "series")
        dash, color = _DASHES[place % len(_DASHES)], look.arm(name)
        iterations, values = _curve(series, "on")
        verdict = plain(dig(comparison, "loss", "verdict"))
        label = _label(name, 48, 2) + (f" ({verdict})" if verdict else "")
        upper.plot(iterations, values, color=color, linestyle=dash, linewidth=1.6, label=label)
        broken = [at for at, value in zip(iterations, values, strict=True) if not math.isfinite(value)]
        # A loss that is no number has no height: crosses at the lower edge.
        if broken:
            crosses = True
            upper.plot(broken, [0.04] * len(broken), "x", color=color, transform=upper.get_xaxis_transform())
        apart = [abs(on - off) for on, off in zip(values, _curve(series, "off")[1], strict=True)]
        if any(math.isfinite(value) and value > 0 for value in apart):
            drawn = True
            points = [value if value > 0 else math.nan for value in apart]
            lower.plot(iterations, points, color=color, linestyle=dash, linewidth=1.6, marker="o", markersize=2.5)
    limits = [_finite(dig(each, "loss", "rounding_baseline", "largest_difference")) for each in shown]
    limit = max((each for each in limits if each), default=None)
    if drawn:
        lower.set_yscale("log")
        lower.yaxis.set_minor_formatter(NullFormatter())
    lower.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}" if value else "0"))
    if limit is not None:
        bottom = min(lower.get_ylim()[0], limit / 10) if drawn else 0.0
        lower.axhspan(bottom, limit, color=look.off, alpha=0.16, lw=0)
        lower.axhline(
            limit,
            color=look.rounding_baseline,
            linestyle="--",
            linewidth=1.2,
            label="largest difference of rounding baseline",
        )
        lower.set_ylim(bottom, max(lower.get_ylim()[1], limit * 1.25))
    if not drawn:
        lower.set_yticks([] if limit is None else [0, limit])
        lower.text(
            0.5,
            0.5,
            "no difference in any step that has numbers" if crosses else "no difference in any step",
            ha="center",
            va="center",
            transform=lower.transAxes,
        )
    upper.set_title("Loss")
    lower.set_title("Distance from off (absolute; equal steps have no point)")
    lower.set_xlabel("iteration")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = upper.get_legend_handles_labels()
    extra, named = lower.get_legend_handles_labels()
    if crosses:
        extra.append(Line2D([], [], color=look.text, marker="x", linestyle=""))
        named.append("the loss is no number")
    columns = 1 if max(map(len, [*labels, *named])) > 44 else 2
    figure.legend([*handles, *extra], [*labels, *named], loc="outside lower left", ncols=columns)
    return figure


def breakdown(report: Json, look: Theme) -> Figure | None:
    """A bar per arm, a segment per category; what communication hides stands in words behind it."""
    arms = [arm for arm in items(report, "arms") if isinstance(dig(arm, "breakdown", "categories"), Mapping)]
    names = list(dict.fromkeys(name for arm in arms for name in dig(arm, "breakdown", "categories")))
    used = [name for name in names if any(_finite(dig(arm, "breakdown", "categories", name)) for arm in arms)]
    if not used:
        return None
    names = [_name(arm) for arm in arms]
    figure, axes = _rows(names, 0.56, "Where the time of a step goes", legend=math.ceil(len(used) / 3))
    longest = max(sum(_finite(dig(arm, "breakdown", "categories", name)) or 0.0 for name in used) for arm in arms)
    for place, arm in enumerate(arms):
        left = 0.0
        for name in used:
            value = max(0.0, _finite(dig(arm, "breakdown", "categories", name)) or 0.0)
            hatch = "///" if name == "communication exposed" else None
            color = look.category(name)
            axes.barh(
                place,
                value,
                left=left,
                height=0.66,
                color=color,
                edgecolor=look.background,
                linewidth=0.8,
                hatch=hatch,
            )
            if longest > 0 and value / longest > 0.08 and hatch is None:
                axes.text(
                    left + value / 2,
                    place,
                    _short(seconds(float(f"{value:.3g}"))),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=_readable(color),
                )
            left += value
        hidden = _finite(dig(arm, "breakdown", "communication", "hidden_seconds"))
        _beside(axes, place, seconds(left) + (f"\n+{seconds(hidden)} hidden" if hidden else ""))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(seconds(float(f"{value:.6g}")))))
    axes.set_xlim(left=0)
    handles = [
        Patch(
            facecolor=look.category(name),
            edgecolor=look.background,
            hatch="///" if name == "communication exposed" else None,
            label=plain(name),
        )
        for name in used
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, handlelength=1.2)
    return figure


def operators(report: Json, look: Theme) -> Iterator[tuple[str, Figure]]:
    """For every operator its cases, a bar per contender: the share it reaches of the nearer ceiling.

    An operator with many cases has several figures, `NAME`, `NAME-2` and so on, none taller than a page.
    """
    rows = [
        row
        for row in items(report, "rows")
        if any(_finite(dig(each, "of_ceiling")) is not None for each in items(row, "contenders"))
    ]
    names = list(dict.fromkeys(plain(dig(each, "name")) for row in rows for each in items(row, "contenders")))
    for operator in dict.fromkeys(plain(dig(row, "operator")) or "?" for row in rows):
        own = [row for row in rows if (plain(dig(row, "operator")) or "?") == operator]
        for page, start in enumerate(range(0, len(own), _CASES_OF_PAGE)):
            suffix = f"-{page + 1}" if page else ""
            kept = own[start : start + _CASES_OF_PAGE]
            yield re.sub(r"[^\w-]", "_", operator) + suffix, _operator(operator, kept, names, look)


def _operator(operator: str, rows: Sequence[Json], every: list[str], look: Theme) -> Figure:
    """One page of one operator; `every`: the contenders of the report, whose colours are the same on all pages."""
    names = list(dict.fromkeys(plain(dig(each, "name")) for row in rows for each in items(row, "contenders")))
    labels = [f"{_label(plain(dig(row, 'case')), 40, 2)}\n{plain(dig(row, 'direction'))}" for row in rows]
    figure, axes = _rows(labels, 0.2 * len(names) + 0.3, f"{operator}: share of the ceiling", legend=2, size=8)
    height = 0.8 / len(names)
    for place, row in enumerate(rows):
        for contender in items(row, "contenders"):
            name = plain(dig(contender, "name"))
            at = place - 0.4 + height * (names.index(name) + 0.5)
            share = _finite(dig(contender, "of_ceiling"))
            text = "did not run" if dig(contender, "error") else "not known" if share is None else percent(share)
            axes.barh(at, share or 0.0, height=height * 0.9, color=look.contender(name, every))
            axes.annotate(text, (share or 0.0, at), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(1, color=look.rounding_baseline, linestyle="--", linewidth=1.2)
    axes.set_xlim(0, max(1.16, axes.get_xlim()[1] * 1.1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(percent(round(value, 6)))))
    handles: list[Any] = [Patch(facecolor=look.contender(name, every), label=name) for name in names]
    handles.append(Line2D([], [], color=look.rounding_baseline, linestyle="--", label="ceiling"))
    figure.legend(handles=handles, loc="outside lower left", ncols=4)
    return figure


def _rows(labels: Sequence[str], height: float, title: str, legend: int = 0, size: int = 9) -> tuple[Figure, Any]:
    """A figure with one horizontal row per label, the first on top."""
    wrapped = [label if "\n" in label else _label(label) for label in labels]
    tall = sum(max(height, 0.17 * (1 + label.count("\n")) + 0.1) for label in wrapped)
    figure = Figure(figsize=(_WIDTH, 1.1 + tall + 0.24 * legend), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(wrapped)), wrapped, fontsize=size)
    axes.set_ylim(len(wrapped) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_title(title)
    return figure, axes


def _beside(axes: Any, place: float, text: str) -> None:
    """A number right of the axes, where it covers nothing."""
    axes.text(1.01, place, text, transform=axes.get_yaxis_transform(), ha="left", va="center", fontsize=9)


def _label(name: str, columns: int = 24, lines: int = 3) -> str:
    """A long name over some lines, broken behind its punctuation where it can be."""
    pieces = re.findall(r"[^+_, ]*[+_, ]*", name)
    found = [""]
    for piece in pieces:
        for part in textwrap.wrap(piece, columns, drop_whitespace=False) or [""]:
            if found[-1] and len(found[-1]) + len(part.rstrip()) > columns:
                found.append("")
            found[-1] += part
    kept = [line.strip() for line in found[:lines]]
    if len(found) > lines:
        kept[-1] = kept[-1][: columns - 3] + "..."
    return "\n".join(kept)


def _short(text: str) -> str:
    """A number for a tick: `80 ms` for `80.00 ms`."""
    return re.sub(r"\.?0+(?= )", "", text) if "." in text else text


def _name(arm: Json) -> str:
    return plain(dig(arm, "name")) or "?"


def _finite(value: object) -> float | None:
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def _numbers(values: object) -> list[float]:
    return [found for each in values if (found := _finite(each)) is not None] if isinstance(values, list) else []


def _curve(series: Sequence[Json], side: str) -> tuple[list[float], list[float]]:
    """Iterations and losses; what is not known or not finite is a gap."""
    kept = [(at, number(dig(point, side))) for point in series if (at := number(dig(point, "iteration"))) is not None]
    values = [value if value is not None and math.isfinite(value) else math.nan for _, value in kept]
    return [at for at, _ in kept], values


def _readable(color: str) -> str:
    """Black or white, whichever can be read on this colour."""
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"
