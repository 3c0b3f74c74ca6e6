"""Plots of time and loss: PNG files, and SVG for the page."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tables import Record, profile
from .training_tables import label
from .wording import cleaned, seconds, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = {
    "time.png": "Step time and peak memory of every arm, and where the time goes",
    "loss.png": "Loss of every arm, and its distance from off",
}

# Okabe and Ito, for colour-blind readers and both page colours.
COLORS = (
    "#2f86c1", "#d9662b", "#23a07a", "#cc79a7", "#b8860b", "#a04a78", "#44aa99", "#7a6bd0", "#56b4e9", "#e0b03c",
    "#c94f4f", "#98a13c", "#8a8f98",
)  # fmt: skip
_TEXT = "#000000"
_NEUTRAL = "#8a8f98"
WIDTH = 9.0


def draw(record: Record, folder: str | Path) -> dict[str, str]:
    """Write PNG files; return SVG by name."""
    record, drawn = cleaned(record), {}
    for name, figure_of in (("time.png", _time), ("loss.png", _loss)) if record["kind"] == "bench" else ():
        with style():
            figure, stream = figure_of(record), io.StringIO()
            if figure is None:
                continue
            figure.savefig(Path(folder, name), dpi=150, facecolor="#ffffff")
            figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
        svg = stream.getvalue()
        svg = svg[svg.index("<svg") :].replace("<svg", f'<svg fill="currentColor" aria-label="{CAPTIONS[name]}"', 1)
        # Text follows the page's colour.
        drawn[name] = svg.replace(_TEXT, "currentColor")
    return drawn


@contextmanager
def style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("The plots need matplotlib: pip install 'mindspeed-lite[bench]'") from error
    settings: dict[str, Any] = {
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "grid.alpha": 0.3,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "text.parse_math": False,  # a dollar is no formula
        "svg.hashsalt": "mindspeed-lite",  # deterministic files
    }
    with matplotlib.rc_context(settings):  # type: ignore[arg-type, unused-ignore]
        yield


def _time(record: Record) -> Figure | None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    arms = [arm for arm in record["arms"] if arm["summary"]]
    profiled = [arm for arm in arms if profile(arm)]
    if not arms:
        return None
    panels = [(arms, _step_times), (arms, _memory)] + ([(profiled, _categories)] if profiled else [])
    heights = [0.9 + 0.55 * len(shown) for shown, _ in panels]
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.2 * bool(profiled)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for panel, (shown, paint) in zip(axes[:, 0], panels, strict=True):
        panel.set_yticks(range(len(shown)), [label(arm["name"]) for arm in shown])
        panel.set_ylim(len(shown) - 0.45, -0.55)
        panel.grid(False, axis="y")
        panel.xaxis.set_major_formatter(EngFormatter("B" if paint is _memory else "s"))
        paint(panel, shown)
    return figure


def _step_times(axes: Any, arms: Sequence[Record]) -> None:
    for place, arm in enumerate(arms):
        summary, color = arm["summary"], _color(arm["name"], arms)
        low, high = summary["step_seconds_p10"], summary["step_seconds_p90"]
        axes.barh(place, high - low, left=low, height=0.72, color=color, alpha=0.25)
        for lane, run in enumerate(arm["runs"]):
            steps = [step["seconds"] for step in run["steps"] if step["measured"]]
            height = place + 0.5 * (lane + 0.5) / len(arm["runs"]) - 0.25
            axes.plot(steps, [height] * len(steps), "o", color=color, markersize=3.4, markeredgewidth=0)
        axes.vlines(summary["step_seconds"], place - 0.4, place + 0.4, color=_TEXT, linewidth=2)
        _write_at_the_right(axes, place, seconds(summary["step_seconds"]))
    axes.set_title("Step time (dots: steps, a lane per run; bar: 10 % to 90 %; tick: median)")


def _memory(axes: Any, arms: Sequence[Record]) -> None:
    for place, arm in enumerate(arms):
        peak = arm["summary"]["peak_memory_bytes"]
        axes.barh(place, peak, height=0.72, color=_color(arm["name"], arms), alpha=0.6)
        _write_at_the_right(axes, place, size(peak))
    axes.set_title("Peak memory of a process")


def _categories(axes: Any, arms: Sequence[Record]) -> None:
    ends = [0.0] * len(arms)
    for name, color in zip(arms[0]["breakdown"]["categories"], itertools.cycle(COLORS)):
        times = [arm["breakdown"]["categories"][name] for arm in arms]
        hatch = "///" if name == "communication exposed" else None
        if any(times):
            axes.barh(range(len(arms)), times, 0.66, ends, color=color, edgecolor="#ffffff", hatch=hatch, label=name)
        ends = [end + time for end, time in zip(ends, times, strict=True)]
    for place, (arm, end) in enumerate(zip(arms, ends, strict=True)):
        hidden = arm["breakdown"]["communication"]["hidden_seconds"]
        _write_at_the_right(axes, place, seconds(end) + (f"\n+{seconds(hidden)} hidden" if hidden else ""))
    axes.set_title("Where the time of the profiled step goes")
    axes.figure.legend(loc="outside lower left", ncols=3)


def _loss(record: Record) -> Figure | None:
    from matplotlib.figure import Figure

    shown = [each for each in record["comparisons"] if each["loss"] and each["loss"]["series"]]
    if not shown:
        return None
    figure = Figure(figsize=(WIDTH, 5.6 + 0.2 * len(shown)), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    iterations, off = _curve(shown[0], "off")
    upper.plot(iterations, off, color=_NEUTRAL, linewidth=5, alpha=0.6, label="off")
    for each in shown:
        color = _color(each["arm"], record["arms"])
        iterations, values = _curve(each, "on")
        upper.plot(iterations, values, color=color, label=f"{label(each['arm'])} ({each['loss']['verdict']})")
        apart = [abs(one - other) or math.nan for one, other in zip(values, _curve(each, "off")[1], strict=True)]
        lower.plot(iterations, apart, "o-", color=color, markersize=2.5)
        # A non-finite loss is a cross at the lower edge.
        broken = [at for at, value in zip(iterations, values, strict=True) if not math.isfinite(value)]
        upper.plot(broken, [0.04] * len(broken), "x", color=color, transform=upper.get_xaxis_transform())
    baselines = [each["loss"]["rounding_baseline"] for each in shown]
    if limits := [each["largest_difference"] for each in baselines if each]:
        lower.axhline(max(limits), color=_TEXT, linestyle="--", linewidth=1.2, label="rounding baseline, largest")
    lower.set_yscale("log", nonpositive="mask")
    lower.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    lower.yaxis.set_minor_formatter(lambda *_: "")
    upper.set_title("Loss (cross: not finite)")
    lower.set_title("Distance from off (equal steps have no point)")
    lower.set_xlabel("iteration")
    lower.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside lower left", ncols=2)
    return figure


def _curve(comparison: Record, side: str) -> tuple[list[int], list[float]]:
    points = [(point["iteration"], point[side]) for point in comparison["loss"]["series"]]
    return [at for at, _ in points], [math.nan if value is None else value for _, value in points]


def _color(name: str, arms: Sequence[Record]) -> str:
    names = [arm["name"] for arm in arms if arm["role"] == "on"]
    return COLORS[names.index(name) % len(COLORS)] if name in names else _NEUTRAL


def _write_at_the_right(axes: Any, place: float, text: str) -> None:
    axes.text(1.01, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=9)
