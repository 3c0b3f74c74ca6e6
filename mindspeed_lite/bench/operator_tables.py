"""Tables of `bench-ops`: per operator, cases in rows and contenders in columns."""

from __future__ import annotations

import statistics
from collections import Counter

from .tables import Record, Table, View, conditions, findings
from .wording import UNKNOWN, interval, percent, seconds

OURS = "mindspeed_lite"
# Plain PyTorch: always there to compare with.
PLAIN = ("torch", "torch sdpa")


def view(record: Record) -> View:
    names = dict.fromkeys(row["operator"] for row in record["rows"])
    tables = (_operator(name, [row for row in record["rows"] if row["operator"] == name]) for name in names)
    return View(
        record["title"],
        *_headline(record),
        summary=(_facts(record), findings(record)),
        details=(*tables, conditions(record)),
        blocks=(),
    )


def _headline(record: Record) -> tuple[str, str]:
    every = [each for row in record["rows"] for each in row["contenders"]]
    if not any(each["seconds"] for each in every if each["name"] == OURS):
        return f"No operator of {OURS} was measured.", "bad"
    ratios = [each["ratio"] for each in every if each["name"] in PLAIN and each["ratio"] is not None]
    if not ratios:
        return f"{OURS} was measured with nothing to compare it with.", ""
    middle, least, most = (interval(each(ratios)) for each in (statistics.median, min, max))
    return f"{OURS} is {middle} as fast as plain PyTorch in the median of {len(ratios)} cases ({least} to {most}).", ""


def _facts(record: Record) -> Table:
    rows = record["rows"]
    counts = ", ".join(f"{many} {margin}" for margin, many in Counter(map(_margin, rows)).most_common())
    facts = [("cases", f"{len(rows)}: {counts}")] if rows else []
    note = f"Other columns than our time are times over it: above 1, {OURS} is faster."
    return Table("", ("", ""), facts, note)


def _margin(row: Record) -> str:
    others = [each for each in row["contenders"] if each["name"] != OURS and each["ratio"] is not None]
    if not others:
        return "not compared"
    if any(each["ratio_high"] < 1 for each in others):
        return "slower than another contender"
    return "faster than every other" if all(each["ratio_low"] > 1 for each in others) else "too close to tell"


def _operator(name: str, rows: list[Record]) -> Table:
    others = list(dict.fromkeys(each["name"] for row in rows for each in row["contenders"] if each["name"] != OURS))
    cells = []
    for row in rows:
        found = {each["name"]: each for each in row["contenders"]}
        ours = found.get(OURS, {})
        times = (_failure(ours) or seconds(ours.get("seconds")), percent(ours.get("of_ceiling")))
        against = (_against(found.get(other, {})) for other in others)
        # The title has the dtype.
        cells.append((f"{row['case'].removesuffix(' ' + row['dtype'])}, {row['direction']}", *times, *against))
    return Table(name, ("case", "time", "of ceiling", *others), cells)


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
