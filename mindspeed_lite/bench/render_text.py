"""A report for the terminal: calm, of a fixed width, the same when piped."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from .render_summary import details, failed_runs, findings, headline, run_words, skipped
from .render_tables import (
    Table,
    arm_table,
    breakdown_table,
    command,
    comparison_table,
    conditions,
    experts_table,
    operator_tables,
)
from .wording import Json, dig, plain, texts

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_TONES = {"good": "bold green", "neutral": "bold", "bad": "bold red"}
_SEVERITIES = {"failure": "red", "warning": "yellow", "note": "cyan"}
_TAIL = 5
_GAP = 2
# A header longer than its cells wraps from here on.
_HEADER = 18


def render(report: Json, columns: int, color: bool) -> str:
    """The whole report as lines of at most `columns`; ANSI colours only where `color`."""
    console = _console(columns, color)
    heading = plain(dig(report, "title")) or "Measurement"
    state = [] if dig(report, "complete") is not False else [("INCOMPLETE", "bold yellow"), (" ", "")]
    _write(console, *state, (heading, "bold"))
    said = headline(report)
    _write(console, (said.title, _TONES[said.tone]))
    _labelled(console, list(said.lines))
    for finding in findings(report):
        where = f"{finding.arm}: " if finding.arm else ""
        _bullet(console, finding.severity, f"{where}{finding.text}")
    bench = dig(report, "kind") != "bench-ops"
    for table in (comparison_table(report), arm_table(report)) if bench else operator_tables(report):
        if table is not None:
            _table(console, table)
    if bench:
        _details(console, report)
        for each in (breakdown_table(report), experts_table(report)):
            if each is not None:
                _table(console, each)
    _heading(console, "Conditions")
    line = command(report)
    produced = ", ".join([*texts(report, "files", "plots"), *texts(report, "files", "trace")])
    rest = [(label, text) for label, text in (("command", line), ("files", produced)) if text]
    _labelled(console, [*conditions(report), *rest])
    return _text(console)


def _console(columns: int, color: bool) -> Console:
    """A console that asks neither the terminal nor the environment anything."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError("The report needs rich: pip install 'mindspeed-lite[bench]'") from error
    return Console(
        file=io.StringIO(),
        width=max(20, columns),
        color_system="standard" if color else None,
        force_terminal=color,
        force_jupyter=False,
        force_interactive=False,
        legacy_windows=False,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        _environ={},
    )


def _text(console: Console) -> str:
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _write(console: Console, *parts: tuple[str, str], indent: int = 0) -> None:
    """One paragraph of styled parts; a word that does not fit is folded."""
    from rich.padding import Padding
    from rich.text import Text

    text: RenderableType = Text.assemble(*parts, overflow="fold")
    console.print(Padding(text, (0, 0, 0, indent)) if indent else text)


def _heading(console: Console, title: str) -> None:
    console.print()
    _write(console, (title, "bold"))


def _labelled(console: Console, rows: list[tuple[str, str]]) -> None:
    """Label and text, the texts aligned and wrapped."""
    from rich.table import Table as Grid
    from rich.text import Text

    left = min(max((len(label) for label, _ in rows), default=0), 24)
    grid = Grid.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    grid.add_column(width=left)
    grid.add_column(ratio=1)
    for label, text in rows:
        grid.add_row(Text(label, style="dim", overflow="fold"), Text(text, overflow="fold"))
    if rows:
        _padded(console, grid)


def _padded(console: Console, content: RenderableType) -> None:
    from rich.padding import Padding

    console.print(Padding(content, (0, 0, 0, _GAP)))


def _bullet(console: Console, severity: str, text: str) -> None:
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid.grid(padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column(width=8)
    grid.add_column(ratio=1)
    grid.add_row(Text(f"{severity}:", style=_SEVERITIES.get(severity, "")), Text(text, overflow="fold"))
    console.print(grid)


def _table(console: Console, table: Table) -> None:
    """Aligned columns; those that do not fit stand below, next to the first column again."""
    _heading(console, table.title)
    rows = table.rows
    if any(not row[0] for row in rows):
        # A first cell left out continues the row above: that cell becomes a heading over its rows.
        for start in [index for index, row in enumerate(rows) if row[0]]:
            end = next((at for at in range(start + 1, len(rows)) if rows[at][0]), len(rows))
            _write(console, (rows[start][0], "cyan"), indent=_GAP)
            part = [row[1:] for row in rows[start:end]]
            _columns(console, table.headers[1:], part, {index - 1 for index in table.left})
    else:
        _columns(console, table.headers, rows, table.left)
    if table.note:
        _write(console, (table.note, "dim"), indent=_GAP)


def _columns(console: Console, headers: list[str], rows: list[list[str]], left: Iterable[int]) -> None:
    from rich.cells import cell_len
    from rich.table import Table as Grid
    from rich.text import Text

    def width(index: int, most: int) -> int:
        cells = max((cell_len(row[index]) for row in rows), default=0)
        return min(most, max(cells, min(cell_len(headers[index]), _HEADER)))

    room = console.width - _GAP
    words = set(left)
    widths = [width(index, room // 2 - _GAP if index else max(20, room * 2 // 5)) for index in range(len(headers))]
    for number, shown in enumerate(_parts(widths, room)):
        if number:
            console.print()
        grid = Grid(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
        for index in shown:
            justify: Literal["left", "right"] = "left" if index in words else "right"
            header = Text(headers[index], overflow="fold")
            grid.add_column(header, justify=justify, width=widths[index], overflow="fold", vertical="bottom")
        for row in rows:
            grid.add_row(*(Text(row[index], overflow="fold") for index in shown))
        _padded(console, grid)


def _parts(widths: list[int], room: int) -> list[list[int]]:
    """Which columns stand next to each other, the first one always."""
    parts = [[0]]
    for index in range(1, len(widths)):
        if sum(widths[each] + _GAP for each in [*parts[-1], index]) > room + _GAP and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(index)
    return parts


def _details(console: Console, report: Json) -> None:
    """What does not fit into cells: reasons for a verdict on losses, skipped features, logs of failed runs."""
    told = [(name, dict(lines).get("loss", "")) for name, lines in details(report)]
    if told:
        _heading(console, "Loss")
        _labelled(console, told)
    left_out = skipped(report)
    if left_out:
        _heading(console, "Not applied")
        _labelled(console, [(arm, f"{feature}: {reasons}") for arm, feature, reasons in left_out])
    failed = failed_runs(report)
    if failed:
        _heading(console, "Runs that failed")
    for arm, run in failed:
        log = plain(dig(run, "log"))
        _write(console, (f"{arm}: {run_words(run)}" + (f" [{log}]" if log else ""), ""), indent=_GAP)
        for line in texts(run, "log_tail")[-_TAIL:]:
            _write(console, (f"| {line}", "dim"), indent=2 * _GAP)
