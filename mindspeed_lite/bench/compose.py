"""The record of finished runs: arms with their figures, comparisons, and findings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
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
    """The report as docs/bench-report.md describes it; runs that failed are in it, with what they left."""
    arms = [_arm(name, runs, ceiling) for name, runs in _by_arm(outcomes).items()]
    first = _description(outcomes) or {"environment": {}, "model": {}}
    comparisons = _comparisons(outcomes, arms)
    # A rounding baseline that did not run was followed by another, or the losses say that they were not judged.
    judged = [run for arm in arms if arm["role"] != "rounding_baseline" for run in arm["runs"]]
    complete = complete and all(run["status"] == "ok" for run in judged)
    affinity = [cores for each in outcomes[0].processes if each.run for cores in each.run["environment"]["affinity"]]
    environment = {**first["environment"], "affinity": affinity, "differences": _differences(outcomes)}
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "bench",
        "created": created,
        "title": title,
        "command": list(command),
        "complete": complete,
        "settings": {**settings, "confidence": CONFIDENCE},
        "environment": environment,
        "model": first["model"],
        "ceiling": ceiling,
        "arms": arms,
        "comparisons": comparisons,
        "findings": _findings(arms, comparisons, environment, complete),
        "files": {"trace": [], "plots": []},
    }


def needs_rounding_baseline(outcomes: Sequence[Outcome]) -> bool:
    """Whether some arm promises the same mathematics and gives other losses than off."""
    arms = [_arm(name, runs, None) for name, runs in _by_arm(outcomes).items()]
    return any(
        row["loss"] is not None and row["loss"]["class"] == "ulp" and row["loss"]["verdict"] != "identical"
        for row in _comparisons(outcomes, arms)
    )


def dtype(outcomes: Sequence[Outcome]) -> str:
    """The precision of the training."""
    found = _description(outcomes)
    return str(found["model"]["dtype"]) if found else "fp32"


def _by_arm(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.arm.name, []).append(outcome)
    return found


def _description(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """The environment, model and report of the first process that trained."""
    return next((each.run for outcome in outcomes for each in outcome.processes if each.run), None)


def higher_ceiling(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Of two measurements of the ceiling each figure's higher, with the source of the products.

    What else a machine does lowers a measurement, for minutes where two cores share their units with a neighbour's.
    """
    if one is None or other is None:
        found = one if other is None else other
        return None if found is None else dict(found)
    figures = {name: max(value, other[name]) for name, value in one.items() if name != "source"}
    first = one if one["flops_per_second"] >= other["flops_per_second"] else other
    return {**figures, "source": first["source"]}


def _arm(name: str, outcomes: Sequence[Outcome], ceiling: dict[str, Any] | None) -> dict[str, Any]:
    first = _description(outcomes)
    entries = (first["report"] or {}).get("entries", []) if first else []
    features = [entry for entry in entries if entry["status"] == "applied" and entry["flags"]]
    profiles = [each.breakdown for outcome in outcomes for each in outcome.processes if each.breakdown]
    return {
        "name": name,
        "role": outcomes[0].arm.role,
        "features": [entry["feature"] for entry in features],
        "skipped": {entry["feature"]: entry["reasons"] for entry in entries if entry["status"] == "skipped"},
        "fallbacks": sorted({text for each in outcomes for process in each.processes for text in process.fallbacks}),
        "numerics": judge.widest([entry["numerics"] for entry in features]),
        "runs": [_run(outcome) for outcome in outcomes],
        "summary": _summary([outcome for outcome in outcomes if outcome.status == "ok"], ceiling),
        "breakdown": breakdown.merge(profiles) if profiles else None,
    }


def _run(outcome: Outcome) -> dict[str, Any]:
    measured = _measured(outcome)
    kept = ("repeat", "status", "reason", "log", "log_tail", "seconds", "exit_code")
    return {
        **{name: getattr(outcome, name) for name in kept},
        "first_step_seconds": _first_step(outcome),
        "peak_memory_bytes": _peaks(outcome),
        "median_step_seconds": statistics.median(measured) if measured else None,
        "steps": [{key: value for key, value in step.items() if key != "profiled"} for step in outcome.steps],
    }


def _measured(outcome: Outcome) -> list[float]:
    return [step["seconds"] for step in outcome.steps if step["measured"]]


def _peaks(outcome: Outcome) -> list[int]:
    return [process.steps[-1]["peak_memory_bytes"] for process in outcome.processes if process.steps]


def _peak(outcome: Outcome) -> float:
    return float(max(_peaks(outcome)))


def _first_step(outcome: Outcome) -> float | None:
    times = [process.steps[0]["time"] for process in outcome.processes if process.steps]
    return max(times) - outcome.launched if times else None


def _summary(outcomes: Sequence[Outcome], ceiling: dict[str, Any] | None) -> dict[str, Any] | None:
    first = _description(outcomes)
    if first is None:
        return None
    seconds = [each for outcome in outcomes for each in _measured(outcome)]
    step = statistics.median(seconds)
    processes = first["environment"]["world_size"]
    tokens = first["model"]["tokens_per_step"] / step
    flops = first["model"]["flops_per_step"] / step / processes
    peak = (ceiling or {}).get("flops_per_second")
    return {
        "step_seconds": step,
        "step_seconds_p10": quantile(seconds, 0.1),
        "step_seconds_p90": quantile(seconds, 0.9),
        "tokens_per_second": tokens,
        "tokens_per_second_per_process": tokens / processes,
        "flops_per_second": flops,
        "utilisation": flops / peak if peak else None,
        "peak_memory_bytes": statistics.median(map(_peak, outcomes)),
        "memory_kind": first["memory_kind"],
        "first_step_seconds": statistics.median(filter(None, map(_first_step, outcomes))),
    }


def _comparisons(outcomes: Sequence[Outcome], arms: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    good = [outcome for outcome in outcomes if outcome.status == "ok"]
    runs = _by_arm(good)
    off = {outcome.repeat: outcome for outcome in runs.get("off", [])}
    baselines = (each for each in good if each.arm.role == "rounding_baseline")
    reference = next(((_ROUNDING_BASELINES[each.arm.arithmetic], each.steps) for each in baselines), None)
    rows = []
    for arm in arms:
        if arm["role"] != "on":
            continue
        pairs = [(off[each.repeat], each) for each in runs.get(arm["name"], []) if each.repeat in off]
        rows.append(_comparison(arm, pairs, reference))
    return rows


def _comparison(
    arm: Mapping[str, Any],
    pairs: Sequence[tuple[Outcome, Outcome]],
    reference: tuple[str, list[dict[str, Any]]] | None,
) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": arm["name"], "against": "off"}
    if not pairs:
        return row | {"speed": None, "memory": None, "first_step": None, "loss": None, "growth": None}
    off, on = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    # The very first run fills caches: compiled code, indices of the data, the disk's.
    later = slice(1, None) if len(pairs) > 1 else slice(None)
    speeds, memory, firsts = (
        [[figure(outcome) for outcome in side] for side in (off, on)]
        for figure in (lambda run: statistics.median(_measured(run)), _peak, lambda run: _first_step(run) or 0.0)
    )
    steps = [outcome.steps for outcome in off], [outcome.steps for outcome in on]
    return row | {
        "speed": _ratio(speeds[0], speeds[1], "faster", "slower"),
        "memory": _ratio(memory[1], memory[0], "larger", "smaller"),
        "first_step": _ratio(firsts[0][later], firsts[1][later], "faster", "slower"),
        "loss": judge.compare_losses(*steps, arm["numerics"], reference),
        "growth": judge.compare_growth(*steps, max(memory[0])),
    }


def _ratio(numerators: Sequence[float], denominators: Sequence[float], above: str, below: str) -> dict[str, Any] | None:
    found = paired_ratio(numerators, denominators)
    return None if found is None else {**asdict(found), "verdict": found.verdict(above, below)}


def _differences(outcomes: Sequence[Outcome]) -> list[str]:
    """What was not the same in all runs although it should have been."""
    described = [(outcome.arm.name, found["environment"]) for outcome in outcomes if (found := _description([outcome]))]
    texts = [
        f"{name} of {arm} differs from that of {described[0][0]}"
        for arm, environment in described
        for name in ("device", "versions", "world_size", "threads", "affinity", "allocator", "variables")
        if environment.get(name) != described[0][1].get(name)
    ]
    return list(dict.fromkeys(texts))


def _findings(
    arms: Sequence[Mapping[str, Any]],
    comparisons: Sequence[Mapping[str, Any]],
    environment: Mapping[str, Any],
    complete: bool,
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def say(severity: str, arm: str | None, text: str) -> None:
        found.append({"severity": severity, "arm": arm, "text": text})

    for arm in arms:
        for run in arm["runs"]:
            if run["status"] != "ok":
                severity = "warning" if arm["role"] == "rounding_baseline" else "failure"
                say(severity, arm["name"], f"repeat {run['repeat']}: {run['status']}: {run['reason']} ({run['log']})")
        for feature, reasons in arm["skipped"].items():
            say("warning", arm["name"], f"{feature} was asked for and not applied: {'; '.join(reasons)}")
        if arm["role"] == "on" and arm["name"] != "off again" and not arm["features"] and arm["summary"]:
            say("warning", arm["name"], "no feature was applied: this arm is off once more")
        for text in arm["fallbacks"]:
            say("warning", arm["name"], f"fallback: {text}")
    for row in comparisons:
        loss, speed, growth = row["loss"], row["speed"], row["growth"]
        if loss and loss["verdict"] == "differs":
            say("failure", row["arm"], f"the training is not the same: {loss['reason']}")
        if loss and loss["verdict"] == "not judged":
            say("warning", row["arm"], f"the losses were not judged: {loss['reason']}")
        if speed and speed["low"] is None:
            say("warning", row["arm"], "there is only one pair of runs: any difference may be noise; raise --repeats")
        if speed and speed["verdict"] == "slower":
            say("warning", row["arm"], f"a step is slower: {speed['ratio']:.3f} times the speed of off")
        if growth and growth["verdict"] == "grows":
            more = growth["bytes_per_step_on"] / 1e6
            say("failure", row["arm"], f"memory grows by {more:.1f} MB with every step, and does not with features off")
    for text in environment.get("differences", ()):
        say("warning", None, f"the runs were not alike: {text}")
    if not complete:
        say("warning", None, "this report is incomplete, it holds what was measured until the end of the benchmark")
    return found
