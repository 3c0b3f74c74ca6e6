"""A report as one self-contained page: nothing is fetched, the plots are inside, in a light and a dark form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from . import plot_theme, plots
from .render_summary import details, failed_runs, findings, headline, run_words, skipped
from .render_tables import (
    Table,
    arm_table,
    breakdown_table,
    command,
    comparison_table,
    conditions,
    contender_rate,
    experts_table,
    ratio_cell,
)
from .wording import (
    INCOMPLETE,
    UNKNOWN,
    Json,
    between,
    count,
    difference,
    dig,
    items,
    number,
    percent,
    plain,
    seconds,
    size,
    texts,
    verdict_cell,
)

if TYPE_CHECKING:
    from jinja2 import Template

_TONES = {
    **dict.fromkeys(("faster", "smaller", "identical", "agrees", "steady", "same"), "good"),
    **dict.fromkeys(("slower", "larger", "differs", "grows", "regression"), "bad"),
    **dict.fromkeys(("one pair", "not judged", "documented deviation"), "warn"),
}


def render(report: Json, drawn: Mapping[str, tuple[str, str]] | None = None) -> str:
    """The page; `drawn`: what `plots.svg` gave for this report, where it is at hand already."""
    template = _template()
    from markupsafe import Markup

    bench = dig(report, "kind") != "bench-ops"
    if drawn is None:
        # The bars in the table of operators say what their plot says.
        drawn = plots.svg(report) if bench else {}
    page: str = template.render(
        title=plain(dig(report, "title")) or "Measurement",
        created=plain(dig(report, "created")),
        kind="operators" if not bench else "training",
        incomplete=INCOMPLETE if dig(report, "complete") is False else "",
        headline=headline(report),
        # The banner says it already.
        findings=[each for each in findings(report) if each.text != INCOMPLETE],
        comparison=_view(comparison_table(report)) if bench else None,
        forest=_forest(report) if bench else None,
        details=details(report) if bench else [],
        skipped=skipped(report),
        arms=_view(arm_table(report)) if bench else None,
        breakdown=_view(breakdown_table(report)) if bench else None,
        experts=_view(experts_table(report)) if bench else None,
        operators=[] if bench else _operators(report),
        plots=[(name.removesuffix(".png"), Markup(light), Markup(dark)) for name, (light, dark) in drawn.items()],
        colors=[plot_theme.theme(report, dark).arms for dark in (False, True)],
        conditions=conditions(report),
        command=command(report),
        failed=len(failed_runs(report)),
        runs=_runs(report),
        files=[*texts(report, "files", "plots"), *texts(report, "files", "trace")],
    )
    return page


@cache
def _template() -> Template:
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("The page needs jinja2: pip install 'mindspeed-lite[bench]'") from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source)


def _view(table: Table | None) -> dict[str, Any] | None:
    """A table for the template: every cell with its class and its tone."""
    if table is None:
        return None
    kinds = ["words" if index in table.left else "figure" for index in range(len(table.headers))]
    rows = [[(cell, kind, _tone(cell)) for cell, kind in zip(row, kinds, strict=True)] for row in table.rows]
    return {
        "title": table.title,
        "headers": list(zip(table.headers, kinds, strict=True)),
        "rows": rows,
        "note": table.note,
    }


def _tone(cell: str) -> str:
    """The tone of the verdict that a cell ends with."""
    verdict = cell.rpartition(", ")[2]
    if " ok, " in cell:
        return "bad"
    return "bad" if verdict.startswith("grows") else _TONES.get(verdict, "")


def _forest(report: Json) -> dict[str, Any] | None:
    """Speed ratios with their intervals on one scale: positions from 0 to 100."""
    found = []
    for comparison in items(report, "comparisons"):
        values = [_finite(dig(comparison, "speed", key)) for key in ("low", "ratio", "high")]
        if values[1] is not None:
            found.append((plain(dig(comparison, "arm")) or "?", values, plain(dig(comparison, "speed", "verdict"))))
    known = [value for _, values, _ in found for value in values if value is not None]
    if not known:
        return None
    low, high = min([*known, 1.0]), max([*known, 1.0])
    margin = max((high - low) * 0.08, 0.005)
    low, high = low - margin, high + margin

    def place(value: float | None) -> float | None:
        return None if value is None else round((value - low) / (high - low) * 100, 2)

    return {
        "one": place(1.0),
        "rows": {
            name: (*map(place, values), _TONES.get(verdict.partition(":")[0], "")) for name, values, verdict in found
        },
    }


def _finite(value: object) -> float | None:
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def _runs(report: Json) -> list[dict[str, Any]]:
    """Every run with its steps and, where it failed, the end of its log."""
    found = []
    for arm in items(report, "arms"):
        for run in items(arm, "runs"):
            facts = [
                ("median step", seconds(dig(run, "median_step_seconds"))),
                ("first step", seconds(dig(run, "first_step_seconds"))),
                ("whole run", seconds(dig(run, "seconds"))),
                ("peak memory by process", ", ".join(_sizes(dig(run, "peak_memory_bytes")))),
                ("exit code", plain(dig(run, "exit_code"))),
                ("log", plain(dig(run, "log"))),
            ]
            found.append(
                {
                    "arm": plain(dig(arm, "name")) or "?",
                    "words": run_words(run),
                    "ok": dig(run, "status") == "ok",
                    "facts": [(label, text) for label, text in facts if text and text != UNKNOWN],
                    "tail": texts(run, "log_tail"),
                    "steps": [_step(step) for step in items(run, "steps")],
                }
            )
    return found


def _sizes(values: object) -> list[str]:
    return [size(value) for value in values] if isinstance(values, list) else []


def _step(step: Json) -> tuple[str, ...]:
    losses = dig(step, "loss")
    gradient = number(dig(step, "grad_norm"))
    return (
        count(dig(step, "iteration")),
        seconds(dig(step, "seconds")),
        "yes" if dig(step, "measured") else "no",
        ", ".join(f"{plain(name)} {_loss(value)}" for name, value in losses.items())
        if isinstance(losses, Mapping) and losses
        else "skipped",
        UNKNOWN if gradient is None else f"{gradient:.4g}",
        size(dig(step, "memory_bytes")),
    )


def _loss(value: object) -> str:
    found = number(value)
    return plain(value) if found is None else f"{found:.6f}" if abs(found) >= 0.01 else difference(found)


def _operators(report: Json) -> list[tuple[str, list[dict[str, Any]]]]:
    """By operator its cases, by case its contenders with the width of their bar."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    rows = items(report, "rows")
    shares = [_finite(dig(each, "of_ceiling")) or 0.0 for row in rows for each in items(row, "contenders")]
    scale = max([1.0, *shares])
    for row in rows:
        earlier = dig(row, "earlier")
        cell = verdict_cell(earlier) if earlier else ""
        then = seconds(dig(earlier, "seconds")) if earlier else ""
        contenders = []
        for contender in items(row, "contenders"):
            share = _finite(dig(contender, "of_ceiling"))
            contenders.append(
                {
                    "name": plain(dig(contender, "name")) or "?",
                    "ours": dig(contender, "name") == "mindspeed_lite",
                    "seconds": seconds(dig(contender, "seconds")),
                    "between": between(dig(contender, "low"), dig(contender, "high")),
                    "rate": contender_rate(row, contender),
                    "share": percent(share),
                    "bar": round(max(0.0, share or 0.0) / scale * 100, 2),
                    "ratio": ratio_cell(contender),
                    "error": plain(dig(contender, "error")),
                }
            )
        what = [plain(dig(row, key)) for key in ("case", "direction")]
        where = [plain(dig(row, key)) for key in ("device", "dtype")]
        where = where[1:] if where[0] == plain(dig(report, "environment", "device")) else where
        bound = plain(dig(row, "bound"))
        grouped.setdefault(plain(dig(row, "operator")) or "?", []).append(
            {
                "case": ", ".join(filter(None, what)) or "?",
                "where": ", ".join(filter(None, [*where, f"bound by {bound}" if bound else ""])),
                "earlier": f"{cell} (then {then})" if then and then != UNKNOWN else cell,
                "tone": _tone(cell),
                "contenders": contenders,
                "ceiling": round(100 / scale, 2),
            }
        )
    return list(grouped.items())
