"""Tables of a training's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .statistics import TOO_FEW
from .tables import DISTURBED, Record, Table, View, conditions, findings, profile
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
    logs = [
        (f"{arm['name']}, run {run['repeat']} {run['status']}: {run['reason']} ({run['log']})", run["log_tail"])
        for arm in record["arms"]
        for run in arm["runs"]
        if run["status"] != "ok"
    ]
    return View(
        record["title"],
        *_headline(record, fastest),
        summary=(_facts(record, fastest), findings(record), _compared(record), _losses(record)),
        details=(_arms(record), _breakdown(record), _not_applied(record), conditions(record)),
        blocks=logs,
    )


def _headline(record: Record, fastest: Record | None) -> tuple[str, str]:
    if fastest is None:
        if any(each["speed"] for each in record["comparisons"]):
            return "Every arm that was compared trains differently from off.", "bad"
        return "Nothing could be compared: no arm finished next to off.", "bad"
    speed, arm = fastest["speed"], label(fastest["arm"])
    pairs, (text, tone) = speed["pairs"], _HEADLINES[speed["verdict"]]
    ratio, _, limits = interval(speed["ratio"], speed["low"], speed["high"]).partition(" (")
    certainty = f"{record['settings']['confidence'] * 100:g} % interval {limits.rstrip(')')}, {len(pairs)} pairs"
    extremes = f"{min(pairs):.2f}x to {max(pairs):.2f}x"
    return text.format(arm=arm, ratio=ratio, certainty=certainty, range=extremes, pairs=len(pairs)), tone


def _facts(record: Record, fastest: Record | None) -> Table:
    if fastest is None:
        return Table("", ("", ""), [])
    features = next(arm["features"] for arm in record["arms"] if arm["name"] == fastest["arm"])
    return Table("", ("", ""), [("features", ", ".join(features) or UNKNOWN)])


def _compared(record: Record) -> Table:
    rows = []
    for each in record["comparisons"]:
        ratios = (judged(each[name]) for name in ("speed", "memory", "first_step"))
        rows.append((label(each["arm"]), *ratios, (each["loss"] or {}).get("verdict", UNKNOWN)))
    note = (
        f"Means of the pairs of runs, with {record['settings']['confidence'] * 100:g} % intervals. "
        "Speed and first step: above 1 is faster. Peak memory: below 1 is smaller."
    )
    return Table("Compared with off", ("arm", "speed", "peak memory", "first step", "loss"), rows, note)


def _losses(record: Record) -> Table:
    found = [(label(each["arm"]), each["loss"]) for each in record["comparisons"] if each["loss"]]
    rows = [
        (arm, loss["class"], difference(loss["grad_norm_difference"]), f"{loss['verdict']}: {loss['reason']}")
        for arm, loss in found
    ]
    note = "Gradient norm: the largest relative difference from off."
    return Table("Loss", ("arm", "promised", "gradient norm", "loss"), rows, note)


def _not_applied(record: Record) -> Table:
    rows = [
        (label(arm["name"]), feature, "; ".join(reasons))
        for arm in record["arms"]
        for feature, reasons in arm["skipped"].items()
    ]
    return Table("Not applied", ("arm", "feature", "why"), rows)


def _arms(record: Record) -> Table:
    rows = []
    for arm in record["arms"]:
        found = (arm["summary"] or {}).get
        rows.append(
            (
                label(arm["name"]), seconds(found("step_seconds")), tokens(found("tokens_per_second")),
                rate(found("flops_per_second"), "FLOP"), percent(found("utilisation")),
                size(found("peak_memory_bytes")), seconds(found("first_step_seconds")), _ends(arm["runs"]),
            )
        )  # fmt: skip
    kinds = {arm["summary"]["memory_kind"] for arm in record["arms"] if arm["summary"]}
    note = f"Compute and peak memory: of one process. Memory: {', '.join(sorted(kinds)) or 'not measured'}."
    headers = ("arm", "median step", "throughput", "compute", "of ceiling", "peak memory", "first step", "runs")
    return Table("Every arm", headers, rows, note)


def _ends(runs: Sequence[Record]) -> str:
    ends = Counter(run["status"] for run in runs)
    good = ends.pop("ok", 0)
    return ", ".join([f"{good} of {len(runs)} ok", *(f"{many} {status}" for status, many in ends.items())])


def _breakdown(record: Record) -> Table:
    arms = [arm for arm in record["arms"] if profile(arm)]
    disturbed = [label(arm["name"]) for arm in record["arms"] if arm["breakdown"] and not profile(arm)]
    found = [arm["breakdown"] for arm in arms]
    times = [{**each["categories"], "hidden communication": each["communication"]["hidden_seconds"]} for each in found]
    names = [name for name in dict.fromkeys(name for each in times for name in each) if any(t.get(name) for t in times)]
    rows = []
    for name in names:
        values = [(each.get(name), breakdown["wall_seconds"]) for each, breakdown in zip(times, found, strict=True)]
        rows.append([name, *(f"{seconds(v)} ({v / wall * 100:.0f} %)" if v else UNKNOWN for v, wall in values)])
    if rows:
        rows.append(["whole profiled step", *(seconds(each["wall_seconds"]) for each in found)])
        rows.append(["step without profiler", *(seconds((arm["summary"] or {}).get("step_seconds")) for arm in arms)])
    note = (
        "One profiled step, mean of the processes. The profiler slows down arms of many small operators most: compare "
        "shares. Hidden communication overlaps with compute."
    )
    if disturbed:
        note += f" Not shown: {', '.join(disturbed)}; the profiled step took over {DISTURBED:g} times as long."
    return Table("Where the time goes", ("category", *(label(arm["name"]) for arm in arms)), rows, note)
