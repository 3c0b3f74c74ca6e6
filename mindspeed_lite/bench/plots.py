"""The plots of a report: PNG files for Markdown, SVG in two themes for a page. Needs matplotlib only when called."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plot_theme import Theme, theme
from .wording import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = {
    "step-time.png": "Step time of every arm",
    "loss.png": "Loss of every arm, and its difference from off",
    "memory.png": "Peak memory of every arm",
    "breakdown.png": "Where the time of a step goes",
}
_OPERATORS = "operators-"


def caption(name: str) -> str:
    """What the plot of this file name shows."""
    if name.startswith(_OPERATORS):
        return f"Share of the ceiling that {name.removeprefix(_OPERATORS).removesuffix('.png')} reaches"
    return CAPTIONS.get(name, name)


def draw(report: Json, folder: str | Path) -> list[str]:
    """Write a PNG for everything there is data for; returns their names."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    names = []
    for name, figure in _figures(report, theme(report, dark=False), "png"):
        figure.savefig(target / name, dpi=150, facecolor=figure.get_facecolor())
        names.append(name)
    return names


def svg(report: Json) -> dict[str, tuple[str, str]]:
    """The same plots by name, for a page: a light and a dark `<svg>`, whose ids no other plot has."""
    drawn = []
    for look in (theme(report, dark=False), theme(report, dark=True)):
        found = {}
        for name, figure in _figures(report, look, "svg"):
            stream = io.StringIO()
            figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
            prefix = f"{name.removesuffix('.png')}-{'dark' if look.dark else 'light'}-"
            found[name] = _embeddable(stream.getvalue(), prefix, caption(name))
        drawn.append(found)
    return {name: (drawn[0][name], drawn[1][name]) for name in drawn[0]}


def _figures(report: Json, look: Theme, form: str) -> Iterator[tuple[str, Figure]]:
    with style(look, form):
        from . import plot_figures

        drawers = {
            "step-time.png": plot_figures.step_time,
            "loss.png": plot_figures.loss,
            "memory.png": plot_figures.memory,
            "breakdown.png": plot_figures.breakdown,
        }
        for name, drawer in drawers.items():
            figure = drawer(report, look)
            if figure is not None:
                yield name, figure
        for operator, page in plot_figures.operators(report, look):
            yield f"{_OPERATORS}{operator}.png", page


@contextmanager
def style(look: Theme, form: str) -> Iterator[None]:
    """matplotlib set up for one theme, for a PNG or an SVG."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("The plots need matplotlib: pip install 'mindspeed-lite[bench]'") from error
    settings: dict[str, Any] = {
        "figure.facecolor": look.background,
        "axes.facecolor": "none" if form == "svg" else look.background,
        "axes.edgecolor": look.muted,
        "axes.labelcolor": look.text,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlecolor": look.text,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "font.family": ["DejaVu Sans"],
        "font.size": 10,
        "grid.color": look.grid,
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "hatch.linewidth": 0.7,
        "text.color": look.text,
        # A dollar in a name is no formula.
        "text.parse_math": False,
        "xtick.color": look.muted,
        "xtick.labelcolor": look.text,
        "ytick.color": look.muted,
        "ytick.labelcolor": look.text,
        # Shapes, not text: the page looks the same wherever it is opened, and equal reports give equal files.
        "svg.fonttype": "path",
        "svg.hashsalt": "mindspeed-lite",
    }
    with matplotlib.rc_context(settings):  # type: ignore[arg-type, unused-ignore]
        yield


def _embeddable(text: str, prefix: str, caption: str) -> str:
    """Only the `<svg>` element, scalable, without addresses and page-wide styles, its ids its own."""
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'(?:xlink:)?href="#', f'href="#{prefix}', text)
    text = re.sub(r"url\(#", f"url(#{prefix}", text)
    box = re.search(r'viewBox="[^"]*"', text)
    head = f'<svg {box[0] if box else ""} role="img" aria-label="{caption}" stroke-linejoin="round">'
    return head + text[text.index(">") + 1 :]
