"""Plots the Pareto front of time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindspeed_lite.planner.search import FoundLayout, Result, Search

from .plots import WIDTH, style


def front(search: Search, result: Result, path: Path) -> None:
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, 6.0), layout="constrained")
        axes = figure.subplots()
        axes.step(*_points(result.front), "o-", where="post", label="faster ones take more memory")
        axes.plot(*_points(result.best), "x", label="fastest")
        axes.axhline(search.budget / 1e9, linestyle="--", linewidth=1, color="gray", label="memory of a device")
        for number, each in enumerate(result.front[:8], 1):
            axes.annotate(str(number), (each.seconds, each.bytes / 1e9), xytext=(4, 4), textcoords="offset points")
            axes.plot([], [], " ", label=f"{number}  {each.candidate.name}")
        axes.set(xlabel="predicted seconds of a step", ylabel="predicted GB of the fullest rank, with the reserve")
        figure.legend(loc="outside lower left", ncols=2)
        figure.savefig(path)


def _points(found: Sequence[FoundLayout]) -> tuple[list[float], list[float]]:
    return [each.seconds for each in found], [each.bytes / 1e9 for each in found]
