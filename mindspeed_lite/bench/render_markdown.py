"""A report as GitHub-flavoured Markdown, the plots beside it as PNG."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote

from .plots import caption
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

# What would be read as markup. An underscore or a dash inside a word is none.
_MARKUP = re.compile(r"[\\`*\[\]|~$#!]|(?<!\w)_|_(?!\w)")


def render(report: Json) -> str:
    """The whole report; it names the plots that the report lists, by their relative names."""
    said = headline(report)
    lines = [f"# {_inline(dig(report, 'title')) or 'Measurement'}", "", f"**{_inline(said.title)}**", ""]
    lines += [f"- {_inline(label)}: {_inline(text)}" for label, text in said.lines]
    found = findings(report)
    if found:
        lines += ["", "## Findings", ""]
    for finding in found:
        where = f"{_inline(finding.arm)}: " if finding.arm else ""
        lines.append(f"- **{_inline(finding.severity.capitalize())}**: {where}{_inline(finding.text)}")
    if dig(report, "kind") == "bench-ops":
        for table in operator_tables(report):
            lines += _table(table)
    else:
        lines += [*_table(comparison_table(report)), *_details(report), *_table(arm_table(report))]
    lines += _plots(report)
    lines += [*_table(breakdown_table(report)), *_table(experts_table(report))]
    lines += ["", "## Conditions", "", *_rows(("", ""), conditions(report))]
    line = command(report)
    if line:
        lines += ["", "Command:", "", *_fenced([line])]
    lines += _failed(report)
    return "\n".join(lines).rstrip() + "\n"


def _inline(value: object) -> str:
    """Text that means only itself, also in a cell of a table."""
    text = " ".join(plain(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\g<0>", text)


def _rows(headers: Iterable[str], rows: Iterable[Iterable[str]], left: Iterable[int] | None = None) -> list[str]:
    names = [_inline(header) for header in headers]
    words = set(range(len(names)) if left is None else left)
    marks = ["---" if index in words else "---:" for index in range(len(names))]
    body = [[_inline(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (names, marks, *body)]


def _table(table: Table | None) -> list[str]:
    if table is None:
        return []
    note = ["", _inline(table.note)] if table.note else []
    return ["", f"## {_inline(table.title)}", "", *_rows(table.headers, table.rows, table.left), *note]


def _details(report: Json) -> list[str]:
    lines = []
    for name, rows in details(report):
        lines += ["", f"### {_inline(name)}", "", *(f"- {_inline(label)}: {_inline(text)}" for label, text in rows)]
    left_out = skipped(report)
    if left_out:
        lines += ["", "## Not applied", "", *_rows(("arm", "feature", "why"), left_out)]
    return lines


def _plots(report: Json) -> list[str]:
    names = texts(report, "files", "plots")
    lines = ["", "## Plots"] if names else []
    for name in names:
        lines += ["", f"![{_inline(caption(name))}]({quote(name, safe='/.-_')})"]
    return lines


def _failed(report: Json) -> list[str]:
    failed = failed_runs(report)
    lines = ["", "## Runs that failed"] if failed else []
    for arm, run in failed:
        log = _inline(dig(run, "log"))
        lines += ["", f"{_inline(arm)}: {_inline(run_words(run))}" + (f" (log: {log})" if log else "")]
        tail = texts(run, "log_tail")
        lines += ["", *_fenced(tail)] if tail else []
    return lines


def _fenced(content: list[str]) -> list[str]:
    """A code block whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for line in content for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *content, fence]
