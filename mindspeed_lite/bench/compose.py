"""Record of finished runs (docs/bench-report.md): arms, comparisons, findings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mindspeed_lite.bench import breakdown, judge
from mindspeed_lite.bench.harness import Outcome
from mindspeed_lite.bench.statistics import CONFIDENCE, paired_ratio, quantile

SCHEMA_VERSION = 1

_ROUNDING_BASELINES = {"float32": "itself in float32", "other order": "itself with sums in another order"}


def report(
    outcomes: Sequence[Outcome],
    *,
    title: str,
    created: str,
    command: Sequence[str],
    complete: bool,
    ceiling: dict[str, Any] | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    by_arm: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_arm.setdefault(outcome.arm.name, []).append(outcome)
    arms = [_arm(runs, ceiling) for runs in by_arm.values()]
    comparisons = [_comparison(arm, by_arm, outcomes) for arm in arms if arm["role"] == "on"]
    first = next((outcome.run for outcome in outcomes if outcome.run), None) or {"environment": {}, "model": {}}
    # A missing rounding baseline was replaced, or losses are not judged.
    judged = [outcome for outcome in outcomes if outcome.arm.role != "rounding_baseline"]
    complete = complete and all(outcome.status == "ok" for outcome in judged)
    affinity = [each.run["environment"]["affinity"] for each in outcomes[0].processes if each.run]
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "bench",
        "created": created,
        "title": title,
        "command": list(command),
        "complete": complete,
        "settings": {**settings, "confidence": CONFIDENCE},
        "environment": {**first["environment"], "affinity": affinity},
        "model": first["model"],
        "ceiling": ceiling,
        "arms": arms,
        "comparisons": comparisons,
        "findings": [finding for arm in arms for finding in _of_arm(arm)]
        + [finding for row in comparisons for finding in _of_comparison(row)]
        + (
            []
            if complete
            else [_finding("warning", None, "this report is incomplete: a run failed or was interrupted")]
        ),
        "files": {"trace": [], "plots": []},
    }


def needs_rounding_baseline(record: Mapping[str, Any]) -> bool:
    losses = [row["loss"] for row in record["comparisons"] if row["loss"]]
    return any(loss["class"] == "ulp" and loss["verdict"] != "identical" for loss in losses)


def higher_ceiling(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if one is None or other is None:
        found = one if other is None else other
        return None if found is None else dict(found)
    first = one if one["flops_per_second"] >= other["flops_per_second"] else other
    return {
        **{name: max(value, other[name]) for name, value in one.items() if name != "source"},
        "source": first["source"],
    }


def _arm(outcomes: Sequence[Outcome], ceiling: dict[str, Any] | None) -> dict[str, Any]:
    arm = outcomes[0].arm
    told = next((outcome.run for outcome in outcomes if outcome.run), None)
    entries = (told["report"] or {}).get("entries", []) if told else []
    features = [entry for entry in entries if entry["status"] == "applied" and entry["flags"]]
    processes = [process for outcome in outcomes for process in outcome.processes]
    profiles = [process.breakdown for process in processes if process.breakdown]
    return {
        "name": arm.name,
        "role": arm.role,
        "features": [entry["feature"] for entry in features],
        "skipped": {entry["feature"]: entry["reasons"] for entry in entries if entry["status"] == "skipped"},
        "fallbacks": sorted({text for process in processes if process.end for text in process.end["fallbacks"]}),
        "numerics": judge.widest([entry["numerics"] for entry in features]),
        "runs": [_run(outcome) for outcome in outcomes],
        "summary": _summary([outcome for outcome in outcomes if outcome.status == "ok"], ceiling),
        "breakdown": breakdown.merge(profiles) if profiles else None,
    }


def _run(outcome: Outcome) -> dict[str, Any]:
    names = ("repeat", "status", "reason", "log", "log_tail", "seconds", "exit_code", "steps")
    return {
        **{name: getattr(outcome, name) for name in names},
        "first_step_seconds": outcome.first_step,
        "peak_memory_bytes": outcome.peaks,
        "median_step_seconds": outcome.median_step,
    }


def _summary(outcomes: Sequence[Outcome], ceiling: dict[str, Any] | None) -> dict[str, Any] | None:
    told = next((outcome.run for outcome in outcomes if outcome.run), None)
    if told is None:
        return None
    seconds = [each for outcome in outcomes for each in outcome.measured_seconds]
    step = statistics.median(seconds)
    processes = told["environment"]["world_size"]
    tokens = told["model"]["tokens_per_step"] / step
    flops = told["model"]["flops_per_step"] / step / processes
    return {
        "step_seconds": step,
        "step_seconds_p10": quantile(seconds, 0.1),
        "step_seconds_p90": quantile(seconds, 0.9),
        "tokens_per_second": tokens,
        "tokens_per_second_per_process": tokens / processes,
        "flops_per_second": flops,
        "utilisation": flops / ceiling["flops_per_second"] if ceiling else None,
        "peak_memory_bytes": statistics.median(max(outcome.peaks) for outcome in outcomes),
        "memory_kind": told["memory_kind"],
        "first_step_seconds": statistics.median(outcome.first_step or 0.0 for outcome in outcomes),
    }


def _comparison(
    arm: Mapping[str, Any], by_arm: Mapping[str, Sequence[Outcome]], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": arm["name"], "against": "off"}
    offs = {outcome.repeat: outcome for outcome in by_arm.get("off", ()) if outcome.status == "ok"}
    ons = [each for each in by_arm[arm["name"]] if each.status == "ok" and each.repeat in offs]
    if not ons:
        return row | dict.fromkeys(("speed", "memory", "first_step", "loss", "growth"))
    pairs = [(offs[on.repeat], on) for on in ons]
    baselines = [each for each in outcomes if each.arm.role == "rounding_baseline" and each.status == "ok"]
    reference = next(((_ROUNDING_BASELINES[each.arm.arithmetic], each.steps) for each in baselines), None)
    steps = [off.steps for off, _ in pairs], [on.steps for _, on in pairs]
    return row | {
        "speed": _ratio(pairs, lambda run: run.median_step or 0.0, ("faster", "slower")),
        "memory": _ratio([(on, off) for off, on in pairs], lambda run: float(max(run.peaks)), ("larger", "smaller")),
        # The very first run fills caches: compiled code, data indices, disk.
        "first_step": _ratio(pairs[1:] or pairs, lambda run: run.first_step or 0.0, ("faster", "slower")),
        "loss": judge.compare_losses(*steps, arm["numerics"], reference),
        "growth": judge.compare_growth(*steps, max(max(off.peaks) for off, _ in pairs)),
    }


def _ratio(
    pairs: Sequence[tuple[Outcome, Outcome]], figure: Callable[[Outcome], float], verdicts: tuple[str, str]
) -> dict[str, Any] | None:
    found = paired_ratio([figure(above) for above, _ in pairs], [figure(below) for _, below in pairs])
    return None if found is None else {**asdict(found), "verdict": found.verdict(*verdicts)}


def _finding(severity: str, arm: str | None, text: str) -> dict[str, Any]:
    return {"severity": severity, "arm": arm, "text": text}


def _of_arm(arm: Mapping[str, Any]) -> list[dict[str, Any]]:
    failed = "warning" if arm["role"] == "rounding_baseline" else "failure"
    found = [
        (failed, f"repeat {run['repeat']}: {run['status']}: {run['reason']} ({run['log']})")
        for run in arm["runs"]
        if run["status"] != "ok"
    ]
    for feature, reasons in arm["skipped"].items():
        found.append(("warning", f"{feature} was requested and not applied: {'; '.join(reasons)}"))
    if arm["role"] == "on" and arm["name"] != "off again" and not arm["features"] and arm["summary"]:
        found.append(("warning", "no feature was applied: this arm is off once more"))
    found += [("warning", f"fallback: {text}") for text in arm["fallbacks"]]
    return [_finding(severity, arm["name"], text) for severity, text in found]


def _of_comparison(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    loss, speed, growth = row["loss"], row["speed"], row["growth"]
    if loss and loss["verdict"] == "differs":
        found.append(("failure", f"the training is not the same: {loss['reason']}"))
    if loss and loss["verdict"] == "not judged":
        found.append(("warning", f"the losses were not judged: {loss['reason']}"))
    if speed and speed["low"] is None:
        found.append(("warning", "there is only one pair of runs: any difference may be noise; raise --repeats"))
    if speed and speed["verdict"] == "slower":
        found.append(("warning", f"a step is slower: {speed['ratio']:.3f} times the speed of off"))
    if growth and growth["verdict"] == "grows":
        more = growth["bytes_per_step_on"] / 1e6
        found.append(("failure", f"memory grows by {more:.1f} MB with every step, and does not with features off"))
    return [_finding(severity, row["arm"], text) for severity, text in found]
