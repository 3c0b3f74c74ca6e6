"""Record of finished runs (docs/bench-report.md): arms, comparisons, findings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mindspeed_lite.bench import breakdown, judge
from mindspeed_lite.bench.harness import Outcome
from mindspeed_lite.bench.statistics import CONFIDENCE, paired_ratio, spread

# Severity, arm, text.
Finding = tuple[str, str | None, str]
_ROUNDING_BASELINES = {"float32": "itself in float32", "other order": "itself with sums in another order"}


def report(outcomes: Sequence[Outcome], complete: bool, ceiling: dict[str, Any] | None, **about: Any) -> dict[str, Any]:
    """The record. about: further entries, with `settings`."""
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
    found: list[Finding] = [each for arm in arms for each in _of_arm(arm)]
    found += [each for row in comparisons for each in _of_comparison(row)]
    if not complete:
        found.append(("warning", None, "this report is incomplete: a run failed or was interrupted"))
    return {
        "schema_version": 1,
        "kind": "bench",
        **about,
        "complete": complete,
        "settings": {**about["settings"], "confidence": CONFIDENCE},
        "environment": {**first["environment"], "affinity": affinity},
        "model": first["model"],
        "ceiling": ceiling,
        "arms": arms,
        "comparisons": comparisons,
        "findings": [{"severity": severity, "arm": name, "text": text} for severity, name, text in found],
        "files": {"trace": [], "plots": []},
    }


def needs_rounding_baseline(record: Mapping[str, Any]) -> bool:
    losses = [row["loss"] for row in record["comparisons"] if row["loss"]]
    return any(loss["class"] == "ulp" and loss["verdict"] != "identical" for loss in losses)


def _arm(outcomes: Sequence[Outcome], ceiling: dict[str, Any] | None) -> dict[str, Any]:
    arm = outcomes[0].arm
    described = next((outcome.run for outcome in outcomes if outcome.run), None)
    entries = (described["report"] or {}).get("entries", []) if described else []
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
    described = next((outcome.run for outcome in outcomes if outcome.run), None)
    if described is None:
        return None
    seconds = [each for outcome in outcomes for each in outcome.measured_seconds]
    step, (low, high) = statistics.median(seconds), spread(seconds)
    model, processes = described["model"], described["environment"]["world_size"]
    tokens, flops = model["tokens_per_step"] / step, model["flops_per_step"] / step / processes
    return {
        "step_seconds": step,
        "step_seconds_p10": low,
        "step_seconds_p90": high,
        "tokens_per_second": tokens,
        "tokens_per_second_per_process": tokens / processes,
        "flops_per_second": flops,
        "utilisation": flops / ceiling["flops_per_second"] if ceiling else None,
        "peak_memory_bytes": statistics.median(max(outcome.peaks) for outcome in outcomes),
        "memory_kind": described["memory_kind"],
        "first_step_seconds": statistics.median(outcome.first_step or 0.0 for outcome in outcomes),
    }


def _comparison(
    arm: Mapping[str, Any], by_arm: Mapping[str, Sequence[Outcome]], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": arm["name"], "against": "off"}
    offs = {outcome.repeat: outcome for outcome in by_arm.get("off", ()) if outcome.status == "ok"}
    ons = [each for each in by_arm[arm["name"]] if each.status == "ok" and each.repeat in offs]
    if not ons:
        return row | dict.fromkeys(("speed", "memory", "first_step", "loss"))
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
    }


def _ratio(
    pairs: Sequence[tuple[Outcome, Outcome]], figure: Callable[[Outcome], float], verdicts: tuple[str, str]
) -> dict[str, Any] | None:
    found = paired_ratio([figure(above) for above, _ in pairs], [figure(below) for _, below in pairs])
    return None if found is None else {**asdict(found), "verdict": found.verdict(*verdicts)}


def _of_arm(arm: Mapping[str, Any]) -> list[Finding]:
    name = arm["name"]
    failed = "warning" if arm["role"] == "rounding_baseline" else "failure"
    found = [
        (failed, name, f"repeat {run['repeat']}: {run['status']}: {run['reason']} ({run['log']})")
        for run in arm["runs"]
        if run["status"] != "ok"
    ]
    for feature, reasons in arm["skipped"].items():
        found.append(("warning", name, f"{feature} was requested and not applied: {'; '.join(reasons)}"))
    if arm["role"] == "on" and name != "off again" and not arm["features"] and arm["summary"]:
        found.append(("warning", name, "no feature was applied: this arm is off once more"))
    return [*found, *(("warning", name, f"fallback: {text}") for text in arm["fallbacks"])]


def _of_comparison(row: Mapping[str, Any]) -> list[Finding]:
    loss, speed = row["loss"] or {}, row["speed"] or {}
    found = []
    if loss.get("verdict") == "differs":
        found.append(("failure", f"the training is not the same: {loss['reason']}"))
    if loss.get("verdict") == "not judged":
        found.append(("warning", f"the losses were not judged: {loss['reason']}"))
    if speed and speed["low"] is None:
        found.append(("warning", "there is only one pair of runs: any difference may be noise; raise --repeats"))
    if speed.get("verdict") == "slower":
        found.append(("warning", f"a step is slower: {speed['ratio']:.3f} times the speed of off"))
    return [(severity, row["arm"], text) for severity, text in found]
