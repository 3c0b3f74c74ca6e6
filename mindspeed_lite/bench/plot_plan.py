"""Plots the Pareto front of time and memory."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from mindspeed_lite.planner.search import Result, Search


def front(search: Search, result: Result, path: Path) -> None:
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    axes = figure.subplots()
    gib = float(1 << 30)
    axes.step(
        [each.seconds for each in result.front], [each.bytes / gib for each in result.front], "o-", where="post",
        label="faster ones take more memory",
    )  # fmt: skip
    axes.plot([each.seconds for each in result.best], [each.bytes / gib for each in result.best], "x", label="fastest")
    axes.axhline(search.budget / gib, linestyle="--", linewidth=1, color="gray", label="memory of a device")
    for each in result.front[:8]:
        axes.annotate(each.candidate.name, (each.seconds, each.bytes / gib), fontsize=7, rotation=15)
    axes.set_xlabel("predicted seconds of a step")
    axes.set_ylabel("predicted GiB of the fullest rank, reserve included")
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.savefig(path)
