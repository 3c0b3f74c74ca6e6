"""A report for the terminal: of a fixed width, the same when piped."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from .tables import Table, View, tone

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"good": "green", "bad": "red", "warn": "yellow"}
_GAP = 2
_INDENT = (0, 0, 0, _GAP)
_WIDEST = 40  # A wider column is wrapped to make room for the next.
_TAIL = 5  # lines of a log


def render(view: View, columns: int, color: bool) -> str:
    """The whole report as lines of at most `columns`; ANSI colours only where `color`."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    stream = io.StringIO()
    # A console that asks neither the terminal nor the environment anything.
    console = Console(
        file=stream, width=columns, color_system="standard" if color else None, force_terminal=color,
        force_jupyter=False, force_interactive=False, legacy_windows=False, no_color=not color, highlight=False,
        markup=False, emoji=False, _environ={},
    )  # fmt: skip
    console.print(Text(view.title, "bold", overflow="fold"))
    console.print(Text(view.headline, f"bold {_STYLES.get(view.tone, '')}", overflow="fold"))
    for table in (*view.summary, *view.details):
        _print_table(console, table)
    for block in view.blocks:
        console.print(Text(f"\n{block.title}", "bold", overflow="fold"))
        for line in block.lines[-_TAIL:]:
            console.print(Padding(Text(line, overflow="fold"), _INDENT))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _print_table(console: Console, table: Table) -> None:
    """The columns side by side; those that do not fit stand below, next to the first one again."""
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text

    if table.title:
        console.print(Text(f"\n{table.title}", "bold", overflow="fold"))
    widths = [max(map(len, column)) for column in zip(table.headers, *table.rows, strict=True)]
    for place, shown in enumerate(_groups(widths, console.width - _GAP)):
        if place:
            console.print()
        grid = Grid(
            box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_header=any(table.headers), header_style="dim"
        )
        for index in shown:
            grid.add_column(
                table.headers[index], justify="right" if table.figures[index] else "left", overflow="fold",
                no_wrap=widths[index] <= _WIDEST,
            )  # fmt: skip
        for row in table.rows:
            grid.add_row(*(Text(row[index], _STYLES.get(tone(row[index]), "")) for index in shown))
        console.print(Padding(grid, _INDENT))
    if table.note:
        console.print(Padding(Text(table.note, "dim", overflow="fold"), _INDENT))


def _groups(widths: list[int], room: int) -> list[list[int]]:
    """Which columns stand next to each other, the first one always."""
    groups = [[0]]
    for index in range(1, len(widths)):
        taken = sum(min(widths[each], _WIDEST) + _GAP for each in [*groups[-1], index])
        if taken > room + _GAP and len(groups[-1]) > 1:
            groups.append([0])
        groups[-1].append(index)
    return groups
