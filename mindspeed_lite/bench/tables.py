"""The shape of a report: a headline, tables of plain text, and blocks of text as they are."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .wording import UNKNOWN, rate

Record = Mapping[str, Any]

SEVERITIES = ("failure", "warning", "note")

# The last word of a cell -> how it is coloured.
_TONES = {
    **dict.fromkeys(("faster", "smaller", "identical", "agrees", "steady"), "good"),
    **dict.fromkeys(("slower", "larger", "differs", "grows", "regression", "failure", "crashed", "hung"), "bad"),
    **dict.fromkeys(("warning", "pair", "tell", "judged", "deviation", "run", "differ", "interrupted"), "warn"),
}


@dataclass(frozen=True)
class Table:
    """Rows of cells under headers; without a title it continues what stands above it."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @property
    def figures(self) -> list[bool]:
        """For each column whether it holds figures, which are aligned right."""
        return [all(map(_is_figure, column)) for column in zip(*self.rows, strict=True)]


@dataclass(frozen=True)
class Block:
    """Preformatted lines, such as the end of a log."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True)
class View:
    """What a reader sees of a record, in every form.

    Attributes:
        summary, details: tables before and after the plots.
        tone: of the headline, `good`, `bad` or empty.
    """

    title: str
    headline: str
    tone: str
    summary: Sequence[Table]
    details: Sequence[Table]
    blocks: Sequence[Block]


def tone(cell: str) -> str:
    """`good`, `bad`, `warn` or nothing: what the verdict at the end of a cell is."""
    return _TONES.get(cell.rpartition(" ")[2], "")


def _is_figure(cell: str) -> bool:
    return cell == UNKNOWN or (cell[:1].isdigit() and ", " not in cell)


def filled(*tables: Table) -> list[Table]:
    """Those that have rows."""
    return [table for table in tables if table.rows]


def findings(record: Record) -> Table:
    """What a reader must know about the measurement or an arm, the gravest first."""
    rows = [[each["severity"], ": ".join(filter(None, (each["arm"], each["text"])))] for each in record["findings"]]
    rows.sort(key=lambda row: SEVERITIES.index(row[0]))
    return Table("Findings", ("severity", "finding"), rows)


def conditions(record: Record) -> Table:
    """Under what conditions all of it was measured; nothing that is not known."""
    ceiling, model = record["ceiling"] or {}, record.get("model", {})
    rates = (rate(ceiling.get("flops_per_second"), "FLOP"), rate(ceiling.get("bytes_per_second"), "B"))
    found = {
        **record["environment"],
        "ceiling of a process": f"{', '.join(rates)} ({ceiling['source']})" if ceiling else "",
        "model": {key: value for key, value in model.items() if key != "parallel"},
        "parallel": model.get("parallel"),
        "settings": record["settings"],
        "measured": record["created"],
        "files": [name for names in record.get("files", {}).values() for name in names],
    }
    rows = [(name.replace("_", " "), text) for name, value in found.items() if (text := _text(value))]
    return Table("Conditions", ("", ""), rows)


def command(record: Record) -> list[Block]:
    """The user's command as a shell would take it."""
    return [Block("Command", [shlex.join(record["command"])])] if record.get("command") else []


def _text(value: Any) -> str:
    """A value of any shape; nothing for what is not known."""
    if isinstance(value, Mapping):
        found = ((key if key.isupper() else key.replace("_", " "), _text(each)) for key, each in value.items())
        return ", ".join(f"{name} {text}" for name, text in found if text)
    if isinstance(value, list):
        return (
            _ranges(value) if value and all(isinstance(each, int) for each in value) else "; ".join(map(_text, value))
        )
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and value >= 10000 else "" if value is None else str(value)


def _ranges(numbers: Iterable[int]) -> str:
    """Adjacent cores as a range: `0-3,8`."""
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ",".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)
