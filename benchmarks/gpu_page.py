"""The page of a campaign on a GPU, from its JSON."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.run import interval
from mindspeed_lite.bench import wording

Json = Mapping[str, Any]
OURS = "mindspeed_lite"


def render(found: Json, data: str) -> str:
    """Markdown; `data` is the name of the JSON beside it."""
    environment, every = found["environment"], found["parts"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines = [
        f"# Operators and trainings on {environment['device']}",
        "",
        f"Measured with `make bench-gpu{' TINY=1' if found['tiny'] else ''}`, written {found['created']}; {versions}.",
        f"All figures and every report: [{data}]({data}).",
        "",
    ]
    if found["tiny"]:
        lines += [
            "The sizes are tiny: this shows that the campaign runs. No figure here says how fast anything is.",
            "",
        ]
    lines += ["| Part | State | Took | At most | Left out |", "| --- | --- | ---: | ---: | --- |"]
    for part in every:
        state = ": ".join(filter(None, [part["state"], _cell(part["reason"])]))
        took = "-" if part["seconds"] is None else f"{part['seconds']:.0f} s"
        left = _cell(", ".join(part["left_out"])) or "-"
        lines.append(f"| {part['name']} | {state} | {took} | {part['limit_seconds']:.0f} s | {left} |")
    lines += ["", *(f"- {note}" for note in found["notes"]), *([""] if found["notes"] else [])]
    lines += _operators([part["report"] for part in every if part["report"] and "rows" in part["report"]])
    lines += _trainings([part for part in every if part["report"] and "arms" in part["report"]])
    lines += ["## Commands", "", "```sh", *(shlex.join(part["command"]) for part in every), "```", ""]
    return "\n".join(lines)


def _operators(reports: Sequence[Json]) -> list[str]:
    rows = [row for report in reports for row in report["rows"]]
    if not rows:
        return ["## Operators", "", "None was measured.", ""]
    names = list(dict.fromkeys(each["name"] for row in rows for each in row["contenders"]))
    names.sort(key=lambda name: name != OURS)
    lines = [
        "## Operators",
        "",
        "Time of a call and its share of the nearer ceiling: the bandwidth of a large copy (read and write counted) or",
        "the rate of a large matrix product, both in plain PyTorch, measured before and after each operator. The",
        "number in parentheses is its time over ours: above 1, ours is faster. Results are compared before",
        "anything is timed: a contender that differs has no time.",
        "",
    ]
    sources = dict.fromkeys(report["ceiling"]["source"] for report in reports if report["ceiling"])
    lines += [*(f"- Ceilings {_cell(source)}" for source in sources), ""]
    lines += [f"| Operator, case | Direction | Ceiling | {' | '.join(names)} |"]
    lines.append(f"| --- | --- | --- |{' ---: |' * len(names)}")
    for row in rows:
        by_name = {each["name"]: each for each in row["contenders"]}
        unit = "B" if row["bound"] == "memory" else "FLOP"
        cells = [_contender(by_name.get(name)) for name in names]
        lines.append(
            f"| {row['operator']} {row['case']} | {row['direction']} | {wording.rate(row['ceiling_per_second'], unit)} "
            f"| {' | '.join(cells)} |"
        )
    said = [finding for report in reports for finding in report["findings"]]
    texts = dict.fromkeys(f"- {each['severity']}: {_cell(each['text'])}" for each in said if each["severity"] != "note")
    apart = dict.fromkeys(f"- {_cell(each['text'])}" for each in said if "not part of its time" in each["text"])
    return [*lines, "", *texts, *apart, *([""] if texts or apart else [])]


def _contender(contender: Json | None) -> str:
    """`1.23 ms, 85 % (1.40x)`, or why there is no time."""
    if contender is None:
        return "-"
    if contender["seconds"] is None:
        return _cell(contender["error"] or "no time")[:160]
    said = f"{wording.seconds(contender['seconds'])}, {wording.percent(contender['of_ceiling'])}"
    known = contender["name"] != OURS and contender["ratio"] is not None
    return said + (f" ({contender['ratio']:.2f})" if known else "")


def _trainings(every: Sequence[Json]) -> list[str]:
    if not every:
        return ["## Trainings", "", "None was measured.", ""]
    lines = [
        "## Trainings",
        "",
        "Off is Megatron as it is. Speed is off over on, memory on over off: means of pairs that were measured one",
        "after the other, with their 95 % interval where there are several. The share is of the device's dense peak by",
        "its data sheet, or of a matrix product measured beside the run where that is not known.",
        "",
        "| Training | Step off | Step on | Speed | Share off | Share on | Peak memory | Loss |",
        "| --- | ---: | ---: | --- | ---: | ---: | --- | --- |",
    ]
    for part in every:
        lines += _training(part)
    lines.append("")
    for part in every:
        report = part["report"]
        features: Sequence[str] = next((arm["features"] for arm in report["arms"] if arm["role"] == "on"), [])
        lines += [f"### {part['name']}", "", f"{part['about']}. On: {', '.join(features) or 'nothing'}.", ""]
        if report["ceiling"]:
            lines.append(f"- Ceiling: {_cell(report['ceiling']['source'])}")
        worth = [each for each in report["findings"] if each["severity"] != "note"]
        lines += [*(f"- {each['severity']}: {_cell(each['text'])}" for each in worth), ""]
    return lines


def _training(part: Json) -> list[str]:
    report = part["report"]
    arms = {arm["name"]: arm for arm in report["arms"]}
    off = arms["off"]["summary"] if "off" in arms else None
    if off is None or not report["comparisons"]:
        return [f"| {part['name']} | nothing to compare: {_cell(part['reason']) or 'no run finished'} |" + " |" * 6]
    rows = []
    for row in report["comparisons"]:
        on = arms[row["arm"]]["summary"]
        if on is None:
            rows.append(f"| {part['name']} | {wording.seconds(off['step_seconds'])} | {row['arm']} failed |" + " |" * 5)
            continue
        cells = [
            part["name"],
            wording.seconds(off["step_seconds"]),
            wording.seconds(on["step_seconds"]),
            interval(row["speed"]),
            wording.percent(off["utilisation"]),
            wording.percent(on["utilisation"]),
            f"{interval(row['memory'])} of {wording.size(off['peak_memory_bytes'])}",
            row["loss"]["verdict"],
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _cell(text: str) -> str:
    """Text that stays within a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
