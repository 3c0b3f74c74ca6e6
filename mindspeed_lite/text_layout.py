"""Lays out text and tables for a terminal: lines break between words, longer words after a separator.

All packages may import this module.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TextIO

# Least columns of text that is wrapped.
_READABLE = 24
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def columns(stream: TextIO, piped: int = 10_000) -> int:
    """Width of a terminal, or COLUMNS; elsewhere `piped`, by default enough for the longest line."""
    is_known = stream.isatty() or "COLUMNS" in os.environ
    return max(40, min(200, shutil.get_terminal_size().columns)) if is_known else piped


def painted(text: str, style: str = "", color: bool = True) -> str:
    codes = ";".join(_CODES[each] for each in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes and color and text else text


def wrapped(text: str, columns: int, indent: int = 0, *, keeps_words: bool = False) -> list[str]:
    """Lines of at most `columns`; lines that fit stay as they are, longer ones keep their margin.

    keeps_words: a word longer than a line is not broken.
    """
    found: list[str] = []
    for paragraph in text.split("\n"):
        start = " " * min(indent + len(paragraph) - len(paragraph.lstrip()), columns // 2)
        line = start
        for word in [paragraph.strip()] if len(paragraph) + indent <= columns else paragraph.split():
            joined = line + word if line == start else f"{line} {word}"
            if len(joined) <= columns:
                line = joined
                continue
            found += [line] if line != start else []
            *full, last = [word] if keeps_words else _pieces(word, max(12, columns - len(start)))
            found += [start + each for each in full]
            line = start + last
        found.append(line.rstrip())
    return found


def _pieces(word: str, room: int) -> list[str]:
    found = [""]
    for part in re.findall(r"[^./:,=-]*[./:,=-]*", word):
        for each in (part[at : at + room] for at in range(0, len(part), room)):
            if len(found[-1] + each) > room:
                found.append("")
            found[-1] += each
    return found


def command(text: str, columns: int) -> list[str]:
    """A command over several lines that a shell reads as one."""
    if len(text) <= columns:
        return [text]
    margin = len(text) - len(text.lstrip())
    first, *others = wrapped(text, columns - 2, keeps_words=True)
    *lines, last = [first, *wrapped(" ".join(others).strip(), columns - 2, margin + 4, keeps_words=True)]
    return [f"{line} \\" for line in lines] + [last]


def is_figure(cell: str) -> bool:
    return cell == "-" or (len(cell) <= 30 and ", " not in cell and cell.lstrip("+-")[:1].isdigit())


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], columns: int, style: Callable[[str], str] | None = None
) -> list[str]:
    """Lines of aligned columns, figures to the right; where they do not fit, a line for each header.

    Args:
        headers: no header line if all are empty.
        style: of a cell by its text; None: no colour.
    """
    cells, has_headers = [tuple(row) for row in rows], any(headers)
    if not cells:
        return []
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # doctor says so
        return ["  ".join(row) for row in ([tuple(headers)] * has_headers + cells)]
    pairs = [*zip(headers, zip(*cells, strict=True), strict=True)]
    figures = [has_headers and all(map(is_figure, column)) for _, column in pairs]
    narrowest = [_narrowest(*pair, is_whole) for pair, is_whole in zip(pairs, figures, strict=True)]
    if has_headers and sum(narrowest) + 2 * (len(pairs) - 1) > columns:
        # Rows as columns, as many next to each other as fit.
        widest = max(len(cell) for row in cells for cell in row) + 2
        count = max(1, (columns - max(map(len, headers))) // widest)
        parts = [cells[at : at + count] for at in range(0, len(cells), count)]
        blocks = [table(("",) * (len(part) + 1), zip(headers, *part, strict=True), columns, style) for part in parts]
        return "\n\n".join(map("\n".join, blocks)).split("\n")
    bold = "bold" if style else ""
    grid = Table(box=None, show_header=has_headers, header_style=bold, padding=(0, 1), pad_edge=False)
    for header, are_figures in zip(headers, figures, strict=True):
        justify: Literal["left", "right"] = "right" if are_figures else "left"
        grid.add_column(Text(header), justify=justify, no_wrap=are_figures, overflow="fold")
    for row in cells:
        grid.add_row(*(Text(cell, style(cell) if style else "") for cell in row))
    console = Console(width=columns, force_terminal=bool(style), color_system="standard" if style else None)
    with console.capture() as captured:
        console.print(grid)
    # Cells are padded within their colour.
    return [re.sub(r" +((?:\x1b\[[\d;]*m)*)$", r"\1", line) for line in captured.get().splitlines()]


def _narrowest(header: str, cells: Sequence[str], is_whole: bool) -> int:
    """Width at which a column can still be read: figures whole, text wrapped but for words."""
    words = [len(word) for cell in (header, *cells) for word in cell.split()]
    longest = max(map(len, cells))
    return longest if is_whole else max(min(longest, _READABLE), min(max(words, default=0), 2 * _READABLE))
