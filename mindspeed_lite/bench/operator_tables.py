"""Tables of `bench-ops`: per operator, cases in rows and contenders in columns."""

from __future__ import annotations

import statistics
from collections import Counter

from .tables import Record, Table, View, command, conditions, filled, findings
from .wording import UNKNOWN, judged, listed, percent, seconds

OURS = "mindspeed_lite"
_MARGINS = (
    "ahead of every other contender",
    "behind at least one",
    "too close to tell",
    "without anything to compare with",
)


def view(record: Record) -> View:
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
    note = f"Other columns than our time are times over it: above 1, {OURS} is faster."
    return Table("", ("", ""), facts if rows else [], note)


def _ours(row: Record) -> Record | None:
    return next((each for each in row["contenders"] if each["name"] == OURS), None)


def _margin(row: Record) -> str:
    others = [each for each in row["contenders"] if each["name"] != OURS and each["ratio"] is not None]
    if not others:
        return _MARGINS[3]
    if any(each["ratio_high"] < 1 for each in others):
        return _MARGINS[1]
    return _MARGINS[0 if all(each["ratio_low"] > 1 for each in others) else 2]


def operators(record: Record) -> list[Table]:
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
        cells.append(
            [
                f"{row['case']}, {row['direction']}",
                _failure(ours) or seconds(ours.get("seconds")),
                percent(ours.get("of_ceiling")),
                *(_against(found.get(other, {})) for other in others),
                *([judged(row["earlier"])] if earlier else []),
            ]
        )
    headers = ("case", "time", "of ceiling", *others)
    return Table(name, (*headers, "since the earlier run") if earlier else headers, cells)


def _failure(contender: Record) -> str:
    if not (error := contender.get("error")):
        return ""
    return "results differ" if error.startswith("does not agree") else "did not run"


def _against(contender: Record) -> str:
    if failure := _failure(contender):
        return failure
    if contender.get("ratio") is None:
        return UNKNOWN if contender.get("seconds") is None else seconds(contender["seconds"])
    near = contender["ratio_low"] <= 1 <= contender["ratio_high"]
    return f"{contender['ratio']:.2f}x{' (too close to tell)' if near else ''}"
