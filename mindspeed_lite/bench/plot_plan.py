"""Plots the Pareto front of time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindspeed_lite.planner.search import FoundLayout, Result, Search

from .plots import WIDTH, style

_GIB = 1 << 30


def front(search: Search, result: Result, path: Path) -> None:
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
        axes = figure.subplots()
        axes.step(*_points(result.front), "o-", where="post", label="faster ones take more memory")
        axes.plot(*_points(result.best), "x", label="fastest")
        axes.axhline(search.budget / _GIB, linestyle="--", linewidth=1, color="gray", label="memory of a device")
        for each in result.front[:8]:
            axes.annotate(each.candidate.name, (each.seconds, each.bytes / _GIB), fontsize=7, rotation=15)
        axes.set(xlabel="predicted seconds of a step", ylabel="predicted GiB of the fullest rank, reserve included")
        axes.legend()
        figure.savefig(path)


def _points(found: Sequence[FoundLayout]) -> tuple[list[float], list[float]]:
    return [each.seconds for each in found], [each.bytes / _GIB for each in found]
