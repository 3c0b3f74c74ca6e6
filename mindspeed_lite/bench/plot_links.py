"""Plots measured links: bandwidth and latency of each pair of ranks."""

from __future__ import annotations

from pathlib import Path

from mindspeed_lite.planner.links import Links

from .plots import WIDTH, style


def draw(links: Links, file: str | Path) -> None:
    """Write the plot as PNG. Raises ImportError without matplotlib, OSError."""
    matrices = {
        "Bandwidth, Gbit/s": [[8e-9 * each for each in row] for row in links.bandwidth],
        "Latency, us": [[1e6 * each for each in row] for row in links.latency],
    }
    with style():
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        for axes, (title, matrix) in zip(figure.subplots(1, 2), matrices.items(), strict=True):
            for rank, row in enumerate(matrix):
                row[rank] = float("nan")
            image = axes.imshow(matrix, norm=LogNorm(), interpolation="nearest", cmap="viridis")
            figure.colorbar(image, ax=axes, shrink=0.8, format="{x:g}")
            axes.grid(False)
            axes.set(title=title, xlabel="to rank", ylabel="from rank")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True))
            hosts = links.hosts
            for border in [rank - 0.5 for rank in range(1, len(hosts)) if hosts[rank] != hosts[rank - 1]]:
                axes.axhline(border, color="white", linewidth=0.5)
                axes.axvline(border, color="white", linewidth=0.5)
        figure.savefig(file, format="png", dpi=150)
