"""Renders a record for a terminal, as Markdown and as HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from mindspeed_lite import text_layout
from mindspeed_lite.text_layout import painted, wrapped

from . import operator_tables, training_tables
from .tables import Record, View, tone
from .wording import cleaned

# Markdown markup; an underscore inside a word is none.
_MARKUP = re.compile(r"[\\`*\[\]|~$#!]|(?<!\w)_|_(?!\w)")
_STYLES = {"good": "green", "bad": "red", "warn": "yellow"}
_LOG_LINES = 5


def view(record: Record) -> View:
    record = cleaned(record)
    found = operator_tables.view(record) if record["kind"] == "bench-ops" else training_tables.view(record)
    summary, details = ([table for table in tables if table.rows] for tables in (found.summary, found.details))
    return found._replace(summary=summary, details=details)


def render(record: Record, plots: Mapping[str, str], html: bool) -> str:
    """HTML with SVG plots by name, or Markdown with captions of plots by name."""
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
    shown = view(record)
    lines: list[str] = []

    def show(content: str, style: str = "", indent: int = 0) -> None:
        lines.extend(painted(line, style, color) for line in wrapped(content, columns, indent))

    show(shown.title, "bold")
    show(shown.headline, f"bold {_STYLES.get(shown.tone, '')}")
    for table in (*shown.summary, *shown.details):
        if table.title:
            show(f"\n{table.title}", "bold")
        style = (lambda cell: _STYLES.get(tone(cell), "")) if color else None
        lines += [f"  {line}".rstrip() for line in text_layout.table(table.headers, table.rows, columns - 2, style)]
        if table.note:
            show(table.note, "dim", 2)
    for title, block in shown.blocks:
        show(f"\n{title}", "bold")
        for line in block[-_LOG_LINES:]:
            show(line, indent=2)
    return "\n".join(lines) + "\n"
