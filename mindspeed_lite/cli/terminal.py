"""Text for a terminal, standard library only: width, colour, wrapped tables; plain and stable when piped."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_GAP = 2


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, whose texts keep their lines, and that takes no abbreviated flags."""

    def __init__(self, **given: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def fail(program: str, message: object, code: int = 2) -> int:
    """Say on stderr, in one line, why the command stops; returns the exit code."""
    print(f"{program}: error: {' '.join(str(message).split())}", file=sys.stderr)
    return code


def why_not_writable(name: str) -> str | None:
    """Why no file can be written there, or None; leaves what is there as it is, and nothing where nothing was."""
    path = Path(name)
    if path.is_dir():
        return "it is a folder; give a file"
    if not path.absolute().parent.is_dir():
        return "there is no such folder"
    is_new = not path.exists()
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        return f"it cannot be written: {error.strerror or error}"
    return None


def width() -> int:
    """Columns to write in: the terminal's, 100 where there is none; never below 60 or above 200."""
    return max(60, min(200, shutil.get_terminal_size((100, 24)).columns))


def has_color(stream: TextIO | None = None) -> bool:
    """Whether `stream` (stdout) is a terminal whose user has not declined colour."""
    stream = sys.stdout if stream is None else stream
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, color: bool) -> str:
    """`text` in one of the styles, where there is colour."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if color and text else text


def wrap(text: str, columns: int) -> list[str]:
    """Lines of at most `columns`; a longer word breaks after a dot, colon, slash or underscore."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        words = [piece for word in paragraph.split() for piece in _pieces(word, columns)]
        lines += textwrap.wrap(" ".join(words), columns, break_on_hyphens=False) or [""]
    return lines


def _pieces(word: str, columns: int) -> list[str]:
    """`word` itself if it fits on a line, else parts that do where its punctuation allows."""
    if len(word) <= columns:
        return [word]
    pieces = [""]
    for part in re.findall(r"[^.:/_]*[.:/_]*", word):
        if pieces[-1] and len(pieces[-1]) + len(part) > columns:
            pieces.append("")
        pieces[-1] += part
    return pieces


def cut(text: str, columns: int) -> str:
    """`text` in one line of at most `columns`, cut after a word where it is longer."""
    return text if len(text) <= columns else text[: columns - 3].rsplit(" ", 1)[0].rstrip(",;:") + "..."


def labelled(rows: Iterable[tuple[str, str]], columns: int, color: bool, indent: int = 2) -> list[str]:
    """Label and text, the texts aligned and wrapped; a row with an empty text is left out."""
    kept = [(label, text) for label, text in rows if text]
    left = max((len(label) for label, _ in kept), default=0) + _GAP
    lines = []
    for label, text in kept:
        for number, line in enumerate(wrap(text, columns - indent - left)):
            head = paint(label, "dim", color) + " " * (left - len(label)) if number == 0 else " " * left
            lines.append(f"{' ' * indent}{head}{line}".rstrip())
    return lines


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: int,
    color: bool,
    minimum: Sequence[int],
) -> list[str] | None:
    """Aligned columns with wrapped cells, or None where they do not fit into `columns`.

    Args:
        minimum: for each column the least width it is readable at; 0: its longest line, unwrapped.
    """
    natural = [
        max(len(line) for cell in (header, *(row[index] for row in rows)) for line in cell.split("\n"))
        for index, header in enumerate(headers)
    ]
    widths = [min(least, wish) if least else wish for least, wish in zip(minimum, natural, strict=True)]
    room = columns - sum(widths) - _GAP * (len(widths) - 1)
    if room < 0:
        return None
    while room > 0 and widths != natural:
        # One column at a time to the cell that lacks most, so that long cells share what there is.
        neediest = max(range(len(widths)), key=lambda index: natural[index] / widths[index])
        widths[neediest] += 1
        room -= 1
    lines = _row(headers, widths, "bold", color)
    for row in rows:
        lines += _row(row, widths, "", color)
    return lines


def _row(cells: Sequence[str], widths: Sequence[int], style: str, color: bool) -> list[str]:
    wrapped = [wrap(cell, columns) for cell, columns in zip(cells, widths, strict=True)]
    lines = []
    for number in range(max(map(len, wrapped))):
        parts = [
            (part[number] if number < len(part) else "").ljust(columns)
            for part, columns in zip(wrapped, widths, strict=True)
        ]
        text = (" " * _GAP).join(parts).rstrip()
        lines.append(paint(text, style, color) if style else text)
    return lines
