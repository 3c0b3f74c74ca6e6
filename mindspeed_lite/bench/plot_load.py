"""Plots expert load: heat map of experts x layers, and imbalance over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from mindspeed_lite.parallel.balance.record import LoadRecord, LoadStep, imbalance
from mindspeed_lite.parallel.balance.simulation import PolicyOutcome

from .plots import COLORS, style

_WIDTH = 9.0
_POINTS = 600


def draw(record: LoadRecord, file: str | Path) -> None:
    """Write both plots as PNG. Raises ImportError without matplotlib, OSError."""
    with style():
        _draw(record, Path(file))


def draw_policies(record: LoadRecord, outcomes: Sequence[PolicyOutcome], file: str | Path) -> None:
    with style():
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(_WIDTH, 4.0), layout="constrained")
        axes = figure.subplots()
        for outcome, color in zip(outcomes, COLORS, strict=False):
            places, points = _thinned([each.step for each in record.steps], outcome.by_step)
            axes.plot(places, points, color=color, linewidth=1.4, label=outcome.name)
        axes.set_title(f"Fullest rank over even load, {_span(record.steps)} (1 is even)")
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(True)
        axes.legend(loc="upper right", ncols=4)
        figure.savefig(Path(file), format="png", dpi=150, facecolor=figure.get_facecolor())


def _draw(record: LoadRecord, file: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    layers = record.header.layers
    figure = Figure(figsize=(_WIDTH, 5.2 + min(5.0, 0.16 * len(layers))), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[2.2 + min(5.0, 0.16 * len(layers)), 3.0])
    image = upper.imshow(_relative(record), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    figure.colorbar(image, ax=upper, label="load / mean of the layer")
    upper.set_title(f"Load of experts, {_span(record.steps)}")
    upper.set_xlabel("expert")
    upper.set_ylabel("layer")
    upper.xaxis.set_major_locator(MaxNLocator(integer=True))
    upper.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    upper.yaxis.set_major_formatter(
        FuncFormatter(lambda at, _: record.label(layers[int(at)]) if 0 <= at < len(layers) and at == int(at) else "")
    )
    experts = [[imbalance(layer) for layer in each.experts] for each in record.steps]
    ranks = [[imbalance(layer) for layer in each.ranks] for each in record.steps]
    curves = (
        ("experts: worst layer", COLORS[1], [*map(max, experts)]),
        ("experts: median layer", COLORS[0], [*map(median, experts)]),
        ("ranks: worst layer", COLORS[2], [*map(max, ranks)]),
    )
    marker = "o" if len(record.steps) < 40 else ""
    for label, color, values in curves:
        places, points = _thinned([each.step for each in record.steps], values)
        lower.plot(places, points, color=color, linewidth=1.4, marker=marker, markersize=3, label=label)
    lower.set_title("Imbalance (max / mean; 1 is even)")
    lower.set_xlabel("step")
    lower.set_ylim(bottom=1 - 0.02 * (lower.get_ylim()[1] - 1))
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    lower.grid(True)
    lower.legend(loc="upper right", ncols=3)
    figure.savefig(file, format="png", dpi=150, facecolor=figure.get_facecolor())


def _relative(record: LoadRecord) -> list[list[float]]:
    return [[each * len(row) / (sum(row) or 1) for each in row] for row in record.totals()]


def _span(steps: Sequence[LoadStep]) -> str:
    first, last = steps[0].step, steps[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _thinned(places: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    size = -(-len(places) // _POINTS)
    groups = range(0, len(places), size)
    return [fmean(places[at : at + size]) for at in groups], [fmean(values[at : at + size]) for at in groups]
