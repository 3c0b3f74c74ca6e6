"""Content of a report in every form: headline, tables, preformatted blocks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mindspeed_lite.text_layout import is_figure

from .wording import rate

Record = Mapping[str, Any]

# How many times as long as a step without it a profiled step may take.
DISTURBED = 2.0
SEVERITIES = ("failure", "warning", "note")

# Last word of a cell -> colour.
_TONES = {
    **dict.fromkeys(("faster", "smaller", "identical", "agrees"), "good"),
    **dict.fromkeys(("slower", "larger", "differs", "regression", "failure", "crashed", "hung"), "bad"),
    **dict.fromkeys(("warning", "pair", "tell", "judged", "deviation", "run", "differ", "interrupted"), "warn"),
}


@dataclass(frozen=True)
class Table:
    """Cells under headers; without a title it continues the previous table."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @property
    def figures(self) -> list[bool]:
        return [all(map(is_figure, column)) for column in zip(*self.rows, strict=True)]


class View(NamedTuple):
    """Plots stand between `summary` and `details`; tables without rows are left out. blocks: title and lines."""

    title: str
    headline: str
    tone: str
    summary: Sequence[Table]
    details: Sequence[Table]
    blocks: Sequence[tuple[str, Sequence[str]]]


def profile(arm: Record) -> Record | None:
    """The breakdown of an arm, unless something disturbed the profiled step."""
    found, summary = arm["breakdown"], arm["summary"]
    is_disturbed = found and summary and found["wall_seconds"] > DISTURBED * summary["step_seconds"]
    return None if is_disturbed else found


def tone(cell: str) -> str:
    """`good`, `bad`, `warn` or empty, by the cell's last word."""
    return _TONES.get(cell.rpartition(" ")[2], "")


def findings(record: Record) -> Table:
    rows = [[each["severity"], ": ".join(filter(None, (each["arm"], each["text"])))] for each in record["findings"]]
    rows.sort(key=lambda row: SEVERITIES.index(row[0]))
    return Table("Findings", ("severity", "finding"), rows)


def conditions(record: Record) -> Table:
    ceiling, model = record["ceiling"] or {}, record.get("model", {})
    rates = (rate(ceiling.get("flops_per_second"), "FLOP"), rate(ceiling.get("bytes_per_second"), "B"))
    found = {
        **record["environment"],
        "ceiling of a process": f"{', '.join(rates)} ({ceiling['source']})" if ceiling else "",
        "model": {key: value for key, value in model.items() if key != "parallel"},
        "parallel": model.get("parallel"),
        "settings": record["settings"],
        "measured": record["created"],
        "traces": record.get("files", {}).get("trace"),
        "command": shlex.join(record.get("command") or ()),
    }
    rows = [(name.replace("_", " "), text) for name, value in found.items() if (text := _text(value))]
    return Table("Conditions", ("", ""), rows)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        found = ((key if key.isupper() else key.replace("_", " "), _text(each)) for key, each in value.items())
        return ", ".join(f"{name} {text}" for name, text in found if text)
    if isinstance(value, list):
        return "; ".join(map(_text, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and value >= 10000 else "" if value is None else str(value)
