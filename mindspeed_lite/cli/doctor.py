"""`mindspeed-lite doctor`: can training start here, what is missing, and how to get it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from . import terminal
from .checks import Row, examine

PROGRAM = "mindspeed-lite doctor"

_STYLE = {"ok": "green", "note": "yellow", "problem": "red"}


def main(arguments: Sequence[str]) -> int:
    """Print the findings; 0 when training can start, 1 when something stands in its way."""
    parser = terminal.Parser(prog=PROGRAM, description="What is there, what is missing and how to get it.")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(list(arguments))
    rows = examine()
    problems = sum(row.status == "problem" for row in rows)
    if options.json:
        found = {"schema_version": 1, "ready": not problems, "rows": [asdict(row) for row in rows]}
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_lines(rows, problems)))
    return 1 if problems else 0


def _lines(rows: list[Row], problems: int) -> list[str]:
    columns, color = terminal.width(), terminal.has_color()
    left = max(len(row.check) for row in rows) + 2
    lines = []
    for row in rows:
        text = row.text + (f"\n-> {row.fix}" if row.fix else "")
        for number, line in enumerate(terminal.wrap(text, columns - left - 9)):
            status = terminal.paint(row.status, _STYLE[row.status], color) + " " * (9 - len(row.status))
            head = f"{status}{row.check:{left}}" if number == 0 else " " * (9 + left)
            lines.append((head + line).rstrip())
    verdict = (
        f"{problems} problem{'s' if problems > 1 else ''}: training cannot start here yet."
        if problems
        else "Training can start."
    )
    return [*lines, "", terminal.paint(verdict, "red" if problems else "green", color)]
