"""Tables of a training's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .statistics import TOO_FEW
from .tables import Block, Record, Table, View, command, conditions, filled, findings
from .wording import UNKNOWN, difference, interval, judged, percent, rate, seconds, size, tokens

_HEADLINES = {
    "faster": ("{arm} is {ratio} as fast as off ({certainty}).", "good"),
    "slower": ("{arm}, the fastest arm, is slower than off: {ratio} as fast ({certainty}).", "bad"),
    "inside the noise": ("{arm} is as fast as off within the noise: {ratio} ({certainty}).", ""),
    TOO_FEW: ("Too few runs to tell whether {arm} is faster than off: {range} in {pairs} pairs; raise --repeats.", ""),
    "one pair: no interval": ("{arm} was {ratio} as fast as off in its only pair of runs, which may be noise.", ""),
}


def label(arm: str) -> str:
    return "on" if "+" in arm else arm


def view(record: Record) -> View:
    sound = [each for each in record["comparisons"] if each["speed"] and each["loss"]["verdict"] != "differs"]
    fastest = max(sound, key=lambda each: (each["speed"]["verdict"] == "faster", each["speed"]["ratio"]), default=None)
    title, tone = _headline(record, fastest)
    return View(
        title=record["title"],
        headline=title,
        tone=tone,
        summary=filled(_facts(record, fastest), findings(record), compared(record), losses(record)),
        details=filled(arms(record), breakdown(record), not_applied(record), conditions(record)),
        blocks=[*_logs(record), *command(record)],
    )


def _headline(record: Record, fastest: Record | None) -> tuple[str, str]:
    if fastest is None:
        if any(each["speed"] for each in record["comparisons"]):
            return "Every arm that was compared trains differently from off.", "bad"
        return "Nothing could be compared: no arm finished next to off.", "bad"
    speed = fastest["speed"]
    ratio, _, limits = interval(speed["ratio"], speed["low"], speed["high"]).partition(" (")
    text, tone = _HEADLINES[speed["verdict"]]
    pairs = speed["pairs"]
    certainty = f"{record['settings']['confidence'] * 100:g} % interval {limits.rstrip(')')}, {len(pairs)} pairs"
    extremes = f"{min(pairs):.2f}x to {max(pairs):.2f}x"
    arm = label(fastest["arm"])
    return text.format(arm=arm, ratio=ratio, certainty=certainty, range=extremes, pairs=len(pairs)), tone


def _facts(record: Record, fastest: Record | None) -> Table:
    if fastest is None:
        return Table("", ("", ""), [])
    features = next(arm["features"] for arm in record["arms"] if arm["name"] == fastest["arm"])
    rows = [
        ["features", ", ".join(features) or UNKNOWN],
        ["peak memory", judged(fastest["memory"])],
        ["loss", f"{fastest['loss']['verdict']}: {fastest['loss']['reason']}"],
    ]
    return Table("", ("", ""), rows)


def compared(record: Record) -> Table:
    rows = [
        [
            label(each["arm"]),
            *(judged(each[name]) for name in ("speed", "memory", "first_step")),
            each["loss"]["verdict"] if each["loss"] else UNKNOWN,
            _growth(each["growth"]),
        ]
        for each in record["comparisons"]
    ]
    note = (
        f"Means of the pairs of runs, in brackets their {record['settings']['confidence'] * 100:g} % intervals. "
        "Speed and first step: above 1 is faster. Peak memory: below 1 is smaller."
    )
    return Table("Compared with off", ("arm", "speed", "peak memory", "first step", "loss", "growth"), rows, note)


def _growth(growth: Record | None) -> str:
    if growth is None or growth["verdict"] != "grows":
        return growth["verdict"] if growth else UNKNOWN
    on, off = size(growth["bytes_per_step_on"]), size(growth["bytes_per_step_off"])
    return f"{on} a step (off: {off}), grows"


def losses(record: Record) -> Table:
    found = [(label(each["arm"]), each["loss"]) for each in record["comparisons"] if each["loss"]]
    rows = [
        [
            arm,
            loss["class"],
            difference(loss["largest_difference"]),
            str(loss["step"]),
            interval(loss["times_rounding_baseline"]),
            difference(loss["grad_norm_difference"]),
            loss["verdict"],
        ]
        for arm, loss in found
    ]
    kinds = {loss["rounding_baseline"]["kind"] for _, loss in found if loss["rounding_baseline"]}
    note = "Largest difference of a loss from off; largest relative difference of a gradient norm."
    if kinds:
        note += f" Of the baseline: root mean square, over that of off from {' or '.join(sorted(kinds))}."
    headers = ("arm", "promised", "largest difference", "iteration", "of the baseline", "gradient norm", "loss")
    return Table("Loss", headers, rows, note)


def not_applied(record: Record) -> Table:
    rows = [
        [label(arm["name"]), feature, "; ".join(reasons)]
        for arm in record["arms"]
        for feature, reasons in arm["skipped"].items()
    ]
    return Table("Not applied", ("arm", "feature", "why"), rows)


def arms(record: Record) -> Table:
    rows = []
    for arm in record["arms"]:
        found = (arm["summary"] or {}).get
        figures = (
            seconds(found("step_seconds")),
            tokens(found("tokens_per_second")),
            rate(found("flops_per_second"), "FLOP"),
            percent(found("utilisation")),
            size(found("peak_memory_bytes")),
            seconds(found("first_step_seconds")),
        )
        rows.append([label(arm["name"]), *figures, _ends(arm["runs"])])
    kinds = {arm["summary"]["memory_kind"] for arm in record["arms"] if arm["summary"]}
    note = f"Compute and peak memory: of one process. Memory: {', '.join(sorted(kinds)) or 'not measured'}."
    headers = ("arm", "median step", "throughput", "compute", "of ceiling", "peak memory", "first step", "runs")
    return Table("Every arm", headers, rows, note)


def _ends(runs: Sequence[Record]) -> str:
    ends = Counter(run["status"] for run in runs)
    good = ends.pop("ok", 0)
    return ", ".join([f"{good} of {len(runs)} ok", *(f"{many} {status}" for status, many in ends.items())])


def breakdown(record: Record) -> Table:
    found = [arm for arm in record["arms"] if arm["breakdown"]]
    walls = [arm["breakdown"]["wall_seconds"] for arm in found]
    times = [
        {**each["categories"], "hidden communication": each["communication"]["hidden_seconds"]}
        for each in (arm["breakdown"] for arm in found)
    ]
    names = [name for name in dict.fromkeys(name for each in times for name in each) if any(t.get(name) for t in times)]
    rows = [
        [name, *(_of_wall(each.get(name), wall) for each, wall in zip(times, walls, strict=True))] for name in names
    ]
    if rows:
        rows.append(["whole profiled step", *map(seconds, walls)])
        rows.append(["step without profiler", *(seconds((arm["summary"] or {}).get("step_seconds")) for arm in found)])
    note = (
        "One profiled step, mean of the processes. The profiler slows down arms of many small operators most: compare "
        "shares here, and speeds by the steps without it. Hidden communication overlaps with compute."
    )
    return Table("Where the time goes", ("category", *(label(arm["name"]) for arm in found)), rows, note)


def _of_wall(value: float | None, wall: float) -> str:
    return f"{seconds(value)} ({value / wall * 100:.0f} %)" if value else UNKNOWN


def _logs(record: Record) -> list[Block]:
    return [
        Block(f"{arm['name']}, run {run['repeat']} {run['status']}: {run['reason']} ({run['log']})", run["log_tail"])
        for arm in record["arms"]
        for run in arm["runs"]
        if run["status"] != "ok"
    ]
