"""The report of the operators: a table for each, a row per case, a column per contender."""

from __future__ import annotations

import statistics
from collections import Counter

from .tables import Record, Table, View, command, conditions, filled, findings
from .wording import UNKNOWN, between, interval, judged, listed, percent, rate, seconds

OURS = "mindspeed_lite"
_MARGINS = (
    "ahead of every other contender",
    "behind at least one",
    "too close to tell",
    "without anything to compare with",
)


def view(record: Record) -> View:
    """The whole report."""
    title, tone = _headline(record)
    return View(
        title=record["title"],
        headline=title,
        tone=tone,
        summary=filled(_facts(record), findings(record)),
        details=filled(*operators(record), conditions(record)),
        blocks=command(record),
    )


def _headline(record: Record) -> tuple[str, str]:
    shares = [each["of_ceiling"] for row in record["rows"] if (each := _ours(row)) and each["of_ceiling"] is not None]
    if not shares:
        return f"No operator of {OURS} was measured.", "bad"
    title = f"{OURS} reaches {percent(statistics.median(shares))} of the ceiling in the median case."
    worse = sum(row["earlier"] is not None and row["earlier"]["verdict"] == "regression" for row in record["rows"])
    if worse:
        return f"{worse} of {len(record['rows'])} cases are slower than in the earlier run. {title}", "bad"
    return title, ""


def _facts(record: Record) -> Table:
    rows = record["rows"]
    counts = Counter(map(_margin, rows))
    facts = [["cases", f"{len(rows)}: {listed([f'{counts[each]} {each}' for each in _MARGINS if counts[each]])}"]]
    if verdicts := Counter(row["earlier"]["verdict"] for row in rows if row["earlier"]):
        facts.append(["since the earlier run", listed([f"{many} {verdict}" for verdict, many in verdicts.items()])])
    return Table("", ("", ""), facts if rows else [])


def _ours(row: Record) -> Record | None:
    return next((each for each in row["contenders"] if each["name"] == OURS), None)


def _margin(row: Record) -> str:
    """How ours does against all others in this row."""
    others = [each for each in row["contenders"] if each["name"] != OURS and each["ratio"] is not None]
    if not others:
        return _MARGINS[3]
    if any(each["ratio_high"] < 1 for each in others):
        return _MARGINS[1]
    return _MARGINS[0 if all(each["ratio_low"] > 1 for each in others) else 2]


def operators(record: Record) -> list[Table]:
    """For every operator its cases: our time, and what the others' is over ours."""
    return [
        _operator(name, [row for row in record["rows"] if row["operator"] == name])
        for name in dict.fromkeys(row["operator"] for row in record["rows"])
    ]


def _operator(name: str, rows: list[Record]) -> Table:
    others = list(dict.fromkeys(each["name"] for row in rows for each in row["contenders"] if each["name"] != OURS))
    earlier = any(row["earlier"] for row in rows)
    cells = []
    for row in rows:
        found = {each["name"]: each for each in row["contenders"]}
        ours = found.get(OURS, {})
        compute = row["bound"] == "compute"
        cells.append(
            [
                f"{row['case']}, {row['direction']}",
                _failure(ours) or seconds(ours.get("seconds")),
                between(ours.get("low"), ours.get("high")),
                rate(ours.get("flops_per_second"), "FLOP") if compute else rate(ours.get("bytes_per_second"), "B"),
                percent(ours.get("of_ceiling")),
                *(_against(found.get(other, {})) for other in others),
                *([judged(row["earlier"])] if earlier else []),
            ]
        )
    note = f"A contender: its time, and over ours with its interval; above 1, {OURS} is faster."
    headers = ("case", "time", "10 % to 90 %", "rate", "of ceiling", *others)
    return Table(name, (*headers, "since the earlier run") if earlier else headers, cells, note)


def _failure(contender: Record) -> str:
    if not (error := contender.get("error")):
        return ""
    return "results differ" if error.startswith("does not agree") else "did not run"


def _against(contender: Record) -> str:
    """`320.0 us, 2.91x (2.79 to 3.05)`."""
    if failure := _failure(contender):
        return failure
    if contender.get("seconds") is None:
        return UNKNOWN
    ratio = interval(contender["ratio"], contender["ratio_low"], contender["ratio_high"])
    return f"{seconds(contender['seconds'])}, {ratio}"
