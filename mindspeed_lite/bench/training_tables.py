"""The report of a training: one function for each table, from the record to rows of plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .statistics import TOO_FEW
from .tables import Block, Record, Table, View, command, conditions, filled, findings
from .wording import UNKNOWN, between, difference, interval, judged, percent, rate, seconds, size, tokens

# The speed verdict of the fastest arm -> the headline and its tone.
_HEADLINES = {
    "faster": ("{arm} is {ratio} as fast as off ({certainty}).", "good"),
    "slower": ("{arm}, the fastest arm, is slower than off: {ratio} as fast ({certainty}).", "bad"),
    "inside the noise": ("{arm} is as fast as off within the noise: {ratio} ({certainty}).", ""),
    TOO_FEW: ("Too few runs to tell whether {arm} is faster than off: {range} in {pairs} pairs; raise --repeats.", ""),
    "one pair: no interval": ("{arm} was {ratio} as fast as off in its only pair of runs, which may be noise.", ""),
}

# Header, text and fields of what an arm's summary holds.
_SUMMARY: tuple[tuple[str, Callable[..., str], tuple[str, ...]], ...] = (
    ("median step", seconds, ("step_seconds",)),
    ("10 % to 90 %", between, ("step_seconds_p10", "step_seconds_p90")),
    ("throughput", tokens, ("tokens_per_second",)),
    ("compute", partial(rate, unit="FLOP"), ("flops_per_second",)),
    ("of ceiling", percent, ("utilisation",)),
    ("peak memory", size, ("peak_memory_bytes",)),
    ("first step", seconds, ("first_step_seconds",)),
)


def view(record: Record) -> View:
    """The whole report."""
    fastest = _fastest(record)
    title, tone = _headline(record, fastest)
    return View(
        title=record["title"],
        headline=title,
        tone=tone,
        summary=filled(_facts(fastest), findings(record), compared(record), losses(record)),
        details=filled(arms(record), breakdown(record), not_applied(record), conditions(record)),
        blocks=[*_logs(record), *command(record)],
    )


def _fastest(record: Record) -> Record | None:
    """The comparison with the best speed among those that train as off does; a proven gain goes first."""
    sound = [each for each in record["comparisons"] if each["speed"] and each["loss"]["verdict"] != "differs"]
    return max(sound, key=lambda each: (each["speed"]["verdict"] == "faster", each["speed"]["ratio"]), default=None)


def _headline(record: Record, fastest: Record | None) -> tuple[str, str]:
    if fastest is None:
        some = any(each["speed"] for each in record["comparisons"])
        nothing = "Nothing could be compared: no arm finished next to off."
        return "Every arm that was compared trains differently from off." if some else nothing, "bad"
    speed = fastest["speed"]
    ratio, _, limits = interval(speed["ratio"], speed["low"], speed["high"]).partition(" (")
    text, tone = _HEADLINES[speed["verdict"]]
    level, pairs = f"{record['settings']['confidence']:.0%}".replace("%", " %"), speed["pairs"]
    certainty = f"{level} interval {limits.rstrip(')')}, {len(pairs)} pairs"
    extremes = f"{min(pairs):.2f}x to {max(pairs):.2f}x"
    return text.format(arm=fastest["arm"], ratio=ratio, certainty=certainty, range=extremes, pairs=len(pairs)), tone


def _facts(fastest: Record | None) -> Table:
    if fastest is None:
        return Table("", ("", ""), [])
    loss = fastest["loss"]
    rows = [["peak memory", judged(fastest["memory"])], ["loss", f"{loss['verdict']}: {loss['reason']}"]]
    return Table("", ("", ""), rows)


def compared(record: Record) -> Table:
    """Every arm against off, a verdict in each cell."""
    rows = [
        [
            each["arm"],
            judged(each["speed"]),
            judged(each["memory"]),
            judged(each["first_step"]),
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
    """Whether memory grows from step to step."""
    if growth is None or growth["verdict"] != "grows":
        return growth["verdict"] if growth else UNKNOWN
    on, off = size(growth["bytes_per_step_on"]), size(growth["bytes_per_step_off"])
    return f"{on} a step (off: {off}), grows"


def losses(record: Record) -> Table:
    """How far every arm's losses and gradient norms are from those of off."""
    rows = [
        [
            each["arm"],
            loss["verdict"],
            difference(loss["largest_difference"]),
            str(loss["step"]),
            interval(loss["times_rounding_baseline"]),
            difference(loss["grad_norm_difference"]),
        ]
        for each in record["comparisons"]
        if (loss := each["loss"])
    ]
    kinds = {each["loss"]["rounding_baseline"]["kind"] for each in record["comparisons"] if _baseline(each)}
    note = "Largest difference of a loss from off; largest relative difference of a gradient norm."
    if kinds:
        note += f" Of the baseline: root mean square, over that of off from {' or '.join(sorted(kinds))}."
    headers = ("arm", "loss", "largest difference", "iteration", "of the baseline", "gradient norm")
    return Table("Loss", headers, rows, note)


def _baseline(comparison: Record) -> Any:
    return comparison["loss"] and comparison["loss"]["rounding_baseline"]


def not_applied(record: Record) -> Table:
    """The features that were asked for and skipped."""
    rows = [
        [arm["name"], feature, "; ".join(reasons)]
        for arm in record["arms"]
        for feature, reasons in arm["skipped"].items()
    ]
    return Table("Not applied", ("arm", "feature", "why"), rows)


def arms(record: Record) -> Table:
    """What each arm measured, in absolute numbers."""
    rows = []
    for arm in record["arms"]:
        summary = arm["summary"] or {}
        figures = [text_of(*(summary.get(key) for key in keys)) for _, text_of, keys in _SUMMARY]
        rows.append([arm["name"], *figures, arm["numerics"], _ends(arm["runs"])])
    kinds = {arm["summary"]["memory_kind"] for arm in record["arms"] if arm["summary"]}
    note = f"Compute and peak memory: of one process. Memory: {', '.join(sorted(kinds)) or 'not measured'}."
    return Table("Every arm", ("arm", *(header for header, _, _ in _SUMMARY), "numerics", "runs"), rows, note)


def _ends(runs: Sequence[Record]) -> str:
    """How the runs of an arm ended: `3 of 3 ok`, `1 of 3 ok, 2 crashed`."""
    ends = Counter(run["status"] for run in runs)
    good = ends.pop("ok", 0)
    return ", ".join([f"{good} of {len(runs)} ok", *(f"{many} {status}" for status, many in ends.items())])


def breakdown(record: Record) -> Table:
    """Where a step's time goes: a row per category, a column per arm."""
    found = [arm for arm in record["arms"] if arm["breakdown"]]
    times = [
        {
            **arm["breakdown"]["categories"],
            "hidden communication": arm["breakdown"]["communication"]["hidden_seconds"],
        }
        for arm in found
    ]
    walls = [arm["breakdown"]["wall_seconds"] for arm in found]
    names = [name for name in dict.fromkeys(name for each in times for name in each) if any(t.get(name) for t in times)]
    rows = [
        [name, *(_of_wall(each.get(name), wall) for each, wall in zip(times, walls, strict=True))] for name in names
    ]
    if rows:
        rows.append(["whole profiled step", *map(seconds, walls)])
        rows.append(["step without profiler", *(seconds((arm["summary"] or {}).get("step_seconds")) for arm in found)])
    note = (
        "One profiled step, mean of the processes. The profiler adds to every operator call, most to an arm of many "
        "small ones: compare shares here, and speeds by the steps without it (median, slowest process). Hidden "
        "communication overlaps with compute and adds nothing."
    )
    return Table("Where the time goes", ("category", *(arm["name"] for arm in found)), rows, note)


def _of_wall(value: float | None, wall: float) -> str:
    return f"{seconds(value)} ({value / wall * 100:.0f} %)" if value else UNKNOWN


def _logs(record: Record) -> list[Block]:
    """The end of the log of every run that failed."""
    return [
        Block(f"{arm['name']}, run {run['repeat']} {run['status']}: {run['reason']} ({run['log']})", run["log_tail"])
        for arm in record["arms"]
        for run in arm["runs"]
        if run["status"] != "ok"
    ]
