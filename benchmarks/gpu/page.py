"""The page of a campaign, from its JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.training import LIGER, OFF, ON
from mindspeed_lite.bench import wording

Json = Mapping[str, Any]
OURS = "mindspeed_lite"


def render(found: Json, data: str) -> str:
    """Markdown; `data` is the name of the JSON."""
    parts: dict[str, Json] = {part["name"]: part for part in found["parts"]}
    machine = figures(parts["machine"], "versions")
    versions = ", ".join(f"{name} {version}" for name, version in (machine.get("versions") or {}).items())
    lines = [
        f"# One GPU: {machine.get('device') or 'not measured yet'}",
        "",
        f"`make bench-gpu{' TINY=1' if found['tiny'] else ''}`, {found['created']}; {versions or 'versions unknown'}.",
        f"Every figure: [{data}]({data}).",
        "",
    ]
    if found["tiny"]:
        lines += [
            "The sizes are tiny: this shows that the campaign runs. No figure here says how fast anything is.",
            "",
        ]
    lines += [*(f"- {note}" for note in found["notes"]), *([""] if found["notes"] else [])]
    lines += _states(found["parts"])
    reached = ceilings(parts)
    lines += _machine(parts, reached)
    lines += _correctness(parts)
    for name, heading in (("decisions", "Decisions"), ("operators", "Remaining operators")):
        lines += [f"## {heading}", "", *_operators(parts[name], reached)]
    for name in ("dense", "experts"):
        lines += [f"## Training: {name}", "", *_training(parts[name], reached)]
    return "\n".join(lines).rstrip() + "\n"


def figures(part: Json, unit: str) -> Json:
    """What a unit measured, or nothing."""
    found: Json = part["units"].get(unit, {}).get("figures", {})
    return found


def ceilings(parts: Mapping[str, Json]) -> Json | None:
    """The higher one of before and after, for bytes and for operations."""
    both = [each for name in ("machine", "machine again") if (each := figures(parts[name], "ceilings"))]
    return {key: max(each[key] for each in both) for key in ("bytes_per_second", "flops_per_second")} if both else None


def _states(parts: Sequence[Json]) -> list[str]:
    rows = []
    for part in parts:
        states = [unit["state"] for unit in part["units"].values()]
        counts = ", ".join(f"{states.count(each)} {each}" for each in dict.fromkeys(states)) or "-"
        took = "-" if part["seconds"] is None else f"{part['seconds']:.0f} s"
        state = ": ".join(filter(None, [part["state"], "" if part["state"] == "complete" else part["reason"]]))
        rows.append((part["name"], part["about"], state, counts, took, f"{part['limit_seconds']:.0f} s"))
    return [*table(("Part", "Measures", "State", "Units", "Took", "At most"), rows), *_bad(parts)]


def _bad(parts: Sequence[Json]) -> list[str]:
    lines = [
        f"- {part['name']}, {name}: {unit['state']}: {_cell(unit['reason'])}"
        for part in parts
        for name, unit in part["units"].items()
        if unit["state"] != "ok"
    ]
    return [*lines, ""] if lines else []


def _machine(parts: Mapping[str, Json], reached: Json | None) -> list[str]:
    lines = ["## Machine", ""]
    asked = figures(parts["machine"], "nvidia-smi")
    if asked:
        lines.append(f"- nvidia-smi: {', '.join(f'{name} {value}' for name, value in asked.items())}")
    for name in ("machine", "machine again"):
        found = figures(parts[name], "ceilings")
        if found:
            rates = (wording.rate(found["flops_per_second"], "FLOP"), wording.rate(found["bytes_per_second"], "B"))
            lines.append(
                f"- ceilings, {'before' if name == 'machine' else 'after'}: {rates[0]}, {rates[1]} ({found['source']})"
            )
    if reached is None:
        lines.append("- ceilings: not measured")
    return [*lines, ""]


def _correctness(parts: Mapping[str, Json]) -> list[str]:
    checks = parts["numerics"]["units"].values()
    states = [unit["figures"].get("status", unit["state"]) for unit in checks]
    lines = ["## Correctness", ""]
    if states:
        counts = ", ".join(f"{states.count(each)} {each}" for each in dict.fromkeys(states))
        lines.append(f"- against float64 (relative 2-norm, output and gradients): {counts}")
    fallbacks = dict.fromkeys(
        f"- {name}: {_cell(unit['figures']['text'])}"
        for name, unit in parts["numerics"]["units"].items()
        if unit["figures"].get("status") == "fallback"
    )
    tests = figures(parts["tests"], "pytest")
    if tests:
        lines.append(f"- CUDA tests: {tests['passed']} passed, {len(tests['bad'])} failed")
        lines += [f"  - {_cell(name)}" for name in tests["bad"]]
    return [*lines, *fallbacks, ""]


def _operators(part: Json, reached: Json | None) -> list[str]:
    measured = [(name, unit["figures"]) for name, unit in part["units"].items() if unit["figures"].get("times")]
    if not measured:
        return ["Nothing was measured.", ""]
    rows = []
    notes: list[str] = []
    for name, found in measured:
        times = found["times"]
        for contender in dict.fromkeys([*times["forward"], *found["errors"]]):
            error = found["errors"].get(contender) or times["forward"].get(contender, {}).get("error")
            if error:
                rows.append((f"{name} {found['case']}", contender, _cell(error)[:120], "", "", "", "", ""))
                continue
            rows.append((f"{name} {found['case']}", contender, *_times(found, contender, reached)))
        notes += [f"- {name}: {note}" for note in found["notes"]]
    header = ("Case", "Contender", "Forward", "Backward", "Both", "Over ours", "Of the ceiling", "Host")
    text = [
        "Device time of a call in bf16. Backward is both less forward. Over ours: above 1, ours is faster. Of the",
        "ceiling: both, of a large copy or matrix product in PyTorch, whichever bounds it. Host: to issue both passes.",
        "A star marks a call that waits for the device; its device time includes the host's.",
        "",
    ]
    return [*text, *table(header, rows), *notes, *([""] if notes else [])]


def _times(found: Json, contender: str, reached: Json | None) -> tuple[str, ...]:
    forward = found["times"]["forward"][contender]
    last = "both" if "both" in found["bytes"] else "forward"
    both = found["times"].get(last, {}).get(contender, {})
    ours = found["times"].get(last, {}).get(OURS, {})
    if "device" not in both:
        return (wording.seconds(forward["device"]), *[_cell(both.get("error") or "-")[:80]] * 2, "", "", "")
    backward = wording.seconds(both["device"] - forward["device"]) if last == "both" else "-"
    over = f"{both['device'] / ours['device']:.2f}" if "device" in ours and contender != OURS else ""
    share = ""
    if reached is not None:
        least = max(
            found["bytes"][last] / reached["bytes_per_second"], found["flops"][last] / reached["flops_per_second"]
        )
        share = wording.percent(least / both["device"])
    star = "*" if both["waits"] else ""
    return (
        wording.seconds(forward["device"]), backward, wording.seconds(both["device"]) + star, over, share,
        wording.seconds(both["host"]),
    )  # fmt: skip


def arms(part: Json) -> dict[str, list[Json]]:
    """The runs that ended well, by arm."""
    found: dict[str, list[Json]] = {}
    for name, unit in part["units"].items():
        if unit["state"] == "ok":
            found.setdefault(name.rpartition(" ")[0], []).append(unit["figures"])
    return found


class Comparison(NamedTuple):
    """Two arms: means of their runs' median steps, highest peaks, and the largest relative difference of a loss."""

    seconds_off: float
    seconds_on: float
    bytes_off: int
    bytes_on: int
    ratios: Sequence[float]
    loss_apart: float

    @property
    def speed(self) -> str:
        """The mean ratio, and that of each pair of runs."""
        return f"{statistics.geometric_mean(self.ratios):.2f}x ({', '.join(f'{each:.2f}' for each in self.ratios)})"


def _apart(off: float | None, on: float | None) -> float:
    """The relative difference of two losses; infinite where one of them is missing or not finite."""
    if off is None or on is None or not (math.isfinite(off) and math.isfinite(on)):
        return math.inf
    return abs(on - off) / abs(off) if off else abs(on)


def compare(off: Sequence[Json], on: Sequence[Json]) -> Comparison:
    """Runs of `on` against those of `off`, each with its partner in the same turn."""
    # In JSON a loss that is not finite is text, and a step without one has none.
    pairs = zip(off[0]["losses"], on[0]["losses"], strict=False)
    losses = [[None if each is None else float(each) for each in pair] for pair in pairs]
    return Comparison(
        statistics.mean(run["step_seconds"] for run in off),
        statistics.mean(run["step_seconds"] for run in on),
        max(run["peak_memory_bytes"] for run in off),
        max(run["peak_memory_bytes"] for run in on),
        [a["step_seconds"] / b["step_seconds"] for a, b in zip(off, on, strict=False)],
        max((_apart(a, b) for a, b in losses), default=math.nan),
    )


def _training(part: Json, reached: Json | None) -> list[str]:
    runs = arms(part)
    if OFF not in runs:
        return ["No run of off finished.", ""]
    rows = []
    for arm in (each for each in (OFF, LIGER, ON) if each in runs):
        found = compare(runs[OFF], runs[arm])
        first = runs[arm][0]
        flops = first["flops_per_step"]
        share = flops / found.seconds_on / reached["flops_per_second"] if reached and flops else None
        steps = ", ".join(wording.seconds(run["step_seconds"]) for run in runs[arm])
        others = ("", "") if arm == OFF else (found.speed, f"{found.loss_apart:.1e}")
        rows.append(
            (
                arm, steps, others[0], "" if share is None else wording.percent(share), wording.size(found.bytes_on),
                f"{found.bytes_on / found.bytes_off:.2f}", others[1],
            )
        )  # fmt: skip
    header = (
        "Arm",
        "Step of each run",
        "Speed (of each pair)",
        "Of the ceiling",
        "Peak memory",
        "Of off",
        "Loss apart",
    )
    features = ", ".join(runs[ON][0]["features"]) if ON in runs else "-"
    text = (
        "Median step of each run, runs in turns. Loss apart: the largest relative difference from off over all steps."
    )
    lines = [text, "", *table(header, rows), f"- On: {features}"]
    fallbacks = dict.fromkeys(text for run in runs.get(ON, ()) for text in run["fallbacks"])
    return [*lines, *(f"- fallback: {_cell(text)}" for text in fallbacks), ""]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table and an empty line."""
    return [
        f"| {' | '.join(header)} |",
        f"|{' --- |' * len(header)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _cell(text: str) -> str:
    """Text that stays within a cell."""
    return " ".join(str(text).split()).replace("|", "\\|")
