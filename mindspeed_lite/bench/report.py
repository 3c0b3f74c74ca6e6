"""The report of a record, for a terminal, as Markdown and as a page, all three from the same tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from . import operator_tables, terminal_report, training_tables
from .tables import Record, View, tone
from .wording import cleaned

# What Markdown would read as markup. An underscore inside a word is none.
_MARKUP = re.compile(r"[\\`*\[\]|~$#!]|(?<!\w)_|_(?!\w)")


def text(record: Record, columns: int, color: bool) -> str:
    """Lines of at most `columns` for a terminal; ANSI colours only where `color`."""
    return terminal_report.render(view(record), columns, color)


def markdown(record: Record, plots: Mapping[str, str]) -> str:
    """GitHub-flavoured Markdown; `plots`: file names and captions of the pictures next to it."""
    return _render("report.md.j2", view(record), plots, _markdown)


def html(record: Record, plots: Mapping[str, str]) -> str:
    """One self-contained page that fetches nothing; `plots`: `<svg>` elements by name."""
    return _render("report.html.j2", view(record), plots)


def view(record: Record) -> View:
    """What all three forms show."""
    record = cleaned(record)
    return operator_tables.view(record) if record["kind"] == "bench-ops" else training_tables.view(record)


def _render(name: str, view: View, plots: Mapping[str, str], finalize: Callable[[Any], Any] | None = None) -> str:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=finalize
    )
    source = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return environment.from_string(source).render(view=view, plots=plots, tone=tone)


def _markdown(value: Any) -> Any:
    """Text that means only itself, also in a cell of a table; what is markup already stays."""
    from markupsafe import Markup

    if isinstance(value, Markup):
        return value
    plain = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Markup(_MARKUP.sub(r"\\\g<0>", plain))
