"""Plots expert load: heat map of experts x layers; imbalance, and the fullest rank by policy, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mindspeed_lite.parallel.balance.record import LoadRecord, imbalance
from mindspeed_lite.parallel.balance.simulation import PolicyOutcome

from .plots import COLORS, WIDTH, style

_POINTS = 600


def draw(record: LoadRecord, outcomes: Sequence[PolicyOutcome], file: str | Path) -> None:
    """Write the plots as PNG. Raises ImportError without matplotlib, OSError."""
    layers = record.header.layers
    height = min(5.0, 0.16 * len(layers))
    with style():
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(WIDTH, 8.4 + height), layout="constrained")
        upper, lower, balanced = figure.subplots(3, 1, height_ratios=[2.2 + height, 3.0, 3.0])
        relative = [[each * len(row) / (sum(row) or 1) for each in row] for row in record.totals()]
        image = upper.imshow(relative, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
        figure.colorbar(image, ax=upper, label="load / mean of the layer")
        upper.grid(False)
        upper.set(title=f"Load of experts, {_span(record)}", xlabel="expert", ylabel="layer")
        upper.xaxis.set_major_locator(MaxNLocator(integer=True))
        places = range(0, len(layers), -(-len(layers) // 12))
        upper.set_yticks(places, [record.label(layers[place]) for place in places])
        experts = [[imbalance(layer) for layer in each.experts] for each in record.steps]
        ranks = [[imbalance(layer) for layer in each.ranks] for each in record.steps]
        curves = {
            "experts: worst layer": [*map(max, experts)],
            "experts: median layer": [*map(median, experts)],
            "ranks: worst layer": [*map(max, ranks)],
        }
        _plot(lower, record, curves, "Imbalance (max / mean; 1 is even)")
        lower.set_ylim(bottom=1 - 0.02 * (lower.get_ylim()[1] - 1))
        policies = {outcome.name: outcome.by_step for outcome in outcomes}
        _plot(balanced, record, policies, "Fullest rank over even load, by policy (1 is even)")
        figure.savefig(file, format="png", dpi=150)


def _plot(axes: Any, record: LoadRecord, curves: Mapping[str, Sequence[float]], title: str) -> None:
    """Curves over steps, as means of so many steps that `_POINTS` remain."""
    size = -(-len(record.steps) // _POINTS)
    groups = [slice(at, at + size) for at in range(0, len(record.steps), size)]
    steps = [fmean(each.step for each in record.steps[group]) for group in groups]
    marker = "o" if len(record.steps) < 40 else ""
    for (label, values), color in zip(curves.items(), COLORS, strict=False):
        points = [fmean(values[group]) for group in groups]
        axes.plot(steps, points, color=color, linewidth=1.4, marker=marker, markersize=3, label=label)
    axes.set(title=title, xlabel="step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def _span(record: LoadRecord) -> str:
    first, last = record.steps[0].step, record.steps[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"
