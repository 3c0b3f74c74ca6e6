"""Lays out text and tables for a terminal: lines break between words, longer words after a separator.

All packages may import this module.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

# Least columns of a cell of text that is wrapped; of text after short cells.
_READABLE, _MAIN_TEXT = 24, 36
Paint = Callable[..., str]
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
            *full, last = [word] if keeps_words else _pieces(word, max(_READABLE // 2, columns - len(start)))
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

    def paint(text: str, cell: str | None = None) -> str:
        """A part of a cell, or of a header."""
        return painted(text, "bold" if cell is None else style(cell)) if style else text

    natural = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    least = [_least(*column) for column in zip(headers, *cells, strict=True)]
    if not has_headers:
        least[-1] = max(least[-1], min(natural[-1], _MAIN_TEXT))
    gaps = len(headers) - 1
    gap = 2 if sum(natural) + 2 * gaps <= columns else 1
    widths = _shared(natural, least, columns - gap * gaps)
    if widths is None:
        return _turned(headers, cells, columns, paint) if has_headers else _stacked(cells, columns, paint)
    rights = [has_headers and all(map(is_figure, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in [headers, *cells] if has_headers else cells:
        columns_of_row = [wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        for place in range(max(map(len, columns_of_row))):
            line = []
            for cell, texts, width, right in zip(row, columns_of_row, widths, rights, strict=True):
                text = texts[place] if place < len(texts) else ""
                pad, shown = " " * (width - len(text)), paint(text, None if row is headers else cell)
                line.append(pad + shown if right else shown + pad)
            lines.append((" " * gap).join(line).rstrip())
    return lines


def _least(header: str, *cells: str) -> int:
    words = [len(word) for cell in (header, *cells) for word in cell.split()]
    return max(min(max(map(len, cells)), _READABLE), min(max(words, default=0), 2 * _READABLE))


def _shared(natural: Sequence[int], least: Sequence[int], room: int) -> list[int] | None:
    """Widths in `room`, for those that lack most first; None where columns would be too narrow."""
    widths = list(natural) if sum(natural) <= room else list(least)
    if sum(widths) > room:
        return None
    while widths != natural and sum(widths) < room:
        lacking = [want - width for want, width in zip(natural, widths, strict=True)]
        widths[lacking.index(max(lacking))] += 1
    return widths


def _turned(headers: Sequence[str], rows: Sequence[Sequence[str]], columns: int, paint: Paint) -> list[str]:
    """Rows as columns, as many next to each other as fit."""
    first = max(map(len, headers)) + 2
    widest = max(len(cell) for row in rows for cell in row) + 2
    count = max(1, (columns - first + 2) // widest)
    lines: list[str] = []
    for at in range(0, len(rows), count):
        lines += [""] if lines else []
        for header, *cells in zip(headers, *rows[at : at + count], strict=True):
            head, pad = paint(header), " " * (first - len(header))
            if count > 1:
                lines.append(head + pad + "  ".join(paint(each.rjust(widest - 2), each) for each in cells))
            else:
                start, *others = wrapped(cells[0], columns, first)
                lines += [head + pad + paint(start.strip(), cells[0]), *others]
    return lines


def _stacked(rows: Sequence[Sequence[str]], columns: int, paint: Paint) -> list[str]:
    """The last cell below the others, indented."""
    lines = []
    for *firsts, last in rows:
        lines.append("  ".join(paint(each, each) for each in firsts if each))
        lines += wrapped(last, columns, indent=4)
    return lines
