"""Renders a record for a terminal, as Markdown and as HTML."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from . import operator_tables, training_tables
from .tables import Record, Table, View, tone
from .wording import cleaned

if TYPE_CHECKING:
    from rich.console import Console

# Markdown markup; an underscore inside a word is none.
_MARKUP = re.compile(r"[\\`*\[\]|~$#!]|(?<!\w)_|_(?!\w)")
_STYLES = {"good": "green", "bad": "red", "warn": "yellow"}
_LOG_LINES = 5
_INDENT = (0, 0, 0, 2)


def view(record: Record) -> View:
    record = cleaned(record)
    return operator_tables.view(record) if record["kind"] == "bench-ops" else training_tables.view(record)


def markdown(record: Record, plots: Mapping[str, str]) -> str:
    return _render(record, plots, html=False)


def html(record: Record, plots: Mapping[str, str]) -> str:
    return _render(record, plots, html=True)


def _render(record: Record, plots: Mapping[str, str], html: bool) -> str:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=None if html else _escaped,
    )  # fmt: skip
    source = resources.files(__package__).joinpath("report.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(view=view(record), plots=plots, tone=tone, html=html)


def _escaped(value: Any) -> Any:
    from markupsafe import Markup

    if isinstance(value, Markup):
        return value
    plain = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Markup(_MARKUP.sub(r"\\\g<0>", plain))


def text(record: Record, columns: int, color: bool) -> str:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    stream, shown = io.StringIO(), view(record)
    console = Console(
        file=stream, width=columns, color_system="standard" if color else None, force_terminal=color,
        force_jupyter=False, legacy_windows=False, no_color=not color, highlight=False, markup=False, emoji=False,
        _environ={},
    )  # fmt: skip
    console.print(Text(shown.title, "bold", overflow="fold"))
    console.print(Text(shown.headline, f"bold {_STYLES.get(shown.tone, '')}", overflow="fold"))
    for table in (*shown.summary, *shown.details):
        _print_table(console, table)
    for block in shown.blocks:
        console.print(Text(f"\n{block.title}", "bold", overflow="fold"))
        for line in block.lines[-_LOG_LINES:]:
            console.print(Padding(Text(line, overflow="fold"), _INDENT))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _print_table(console: Console, table: Table) -> None:
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text

    if table.title:
        console.print(Text(f"\n{table.title}", "bold", overflow="fold"))
    grid = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(table.headers), header_style="dim")
    for header, is_figure in zip(table.headers, table.figures, strict=True):
        grid.add_column(header, justify="right" if is_figure else "left", overflow="fold")
    for row in table.rows:
        grid.add_row(*(Text(cell, _STYLES.get(tone(cell), "")) for cell in row))
    console.print(Padding(grid, _INDENT))
    if table.note:
        console.print(Padding(Text(table.note, "dim", overflow="fold"), _INDENT))
